"""The values that pass between a gateway and its text processes, and how they are computed.

A gateway sends a `TextJob` and the raw body. The text process checks the body and answers with `Asked`: the model and
the caller's options for waiting. The gateway looks the model up and sends `ModelFacts`. The text process answers with a
`PreparedBody`, which has token ids and block hashes, and no text of the prompt unless the answer needs it (echo).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec

from control_plane.accounts.identity import Caller
from control_plane.dispatch.block_hashes import wire_prompt
from control_plane.generation import CachePolicy, EncoderInput, ModelFacts, ModelTask, TokenIds, WirePrompt
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    choice_seed,
    new_seed,
    prompt_ids,
    sampling_params,
)
from control_plane.text.structure import GrammarCheck
from control_plane.text.thinking.planning import ThinkingPlan, plan_thinking, stop_ids_of
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tools.planning import ToolPlan, plan_tools
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import InvalidRequest

Endpoint = Literal[
    "chat",
    "completions",
    "run",
    "run_named_in_body",
    "binding",
    "tokenize",
    "detokenize",
    "embeddings",
    "rerank",
]
Operation = Literal["chat", "text_completion", "embeddings", "rerank", "text_classification"]
"""As `gen_ai.operation.name` of traces and metrics."""


NOBODY = Caller("")
"""Text processes do not learn who calls."""


class TextJob(msgspec.Struct, frozen=True):
    """One HTTP request whose raw body is to be prepared."""

    endpoint: Endpoint
    model: str = ""
    """The model's name if it is in the path or a header; "" if it is in the body."""
    query: tuple[tuple[str, str], ...] = ()
    salt: bytes | None = None
    """The salt of the account's block hashes; None: they are not computed."""
    strict_fields: bool = False
    """Whether fields that change nothing are refused."""


class AskedOptions(msgspec.Struct, frozen=True):
    """The options that traces show."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    num_choices: int = 1

    @classmethod
    def of(cls, options: GenerationOptions) -> AskedOptions:
        return cls(options.max_tokens, options.temperature, options.top_p, options.seed, options.num_choices)


class Asked(msgspec.Struct, frozen=True):
    """What a checked body asks for, as far as its model is not needed."""

    model: str
    operation: Operation
    options: AskedOptions = AskedOptions()
    num_prompts: int = 1
    reject_if_busy: bool = False
    timeout_seconds: float | None = None
    session: str = ""
    """The id of a session that the body names; the header's takes precedence."""
    service_tier: str = ""
    """The class that the body asks for, by OpenAI's name; the header's counts if it is empty."""

    @classmethod
    def of(cls, request: CompletionRequest | ChatRequest) -> Asked:
        operation: Operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
        return cls(request.model, operation, AskedOptions.of(request.options))


class AnswerForm(msgspec.Struct, frozen=True):
    """How the answer to a body is written."""

    model: str
    """The caller's name for the model."""
    stream: bool = False
    with_usage_chunk: bool = False
    with_continuous_usage: bool = False
    """Every chunk of a stream has the usage so far."""
    is_json: bool = False
    """The answer's text is a JSON value."""
    is_chat: bool = True
    """OpenAI's chat objects; else those of plain completions."""
    with_thinking: bool = True
    """The answer has the thinking, too, in a field of its own."""
    echo: bool = False
    num_logprobs: int | None = None
    """With `echo`: the alternatives of each token of the prompt; None: no log probabilities."""


class PreparedPrompt(msgspec.Struct, frozen=True):
    """One prompt, ready to be submitted."""

    continues_text: bool
    """Whether the answer continues the prompt's text; the answer of a chat does not."""
    token_ids: bytes
    """Four little-endian bytes each."""
    wire: WirePrompt
    num_public_tokens: int
    sampling: SamplingParams
    choice_seeds: tuple[int, ...]
    stop: tuple[str, ...]
    cache: CachePolicy
    cache_salt: str
    tool_form: str = ""
    """The name of the form of tool calls; "" if the answer is only text."""
    shown_ids: tuple[int, ...] = ()
    """Control tokens that the reader of tool calls needs by name."""
    text: str | None = None
    """The prompt as text, if the answer needs it."""
    thinking: ThinkingPlan | None = None
    """How the thinking is split off; None if the answer has none."""


class EncodedForm(msgspec.Struct, frozen=True):
    """How the values of an encoder are written."""

    kind: Literal["embeddings", "rerank", "native_embeddings", "native_scores", "native_classes"]
    """The first two are OpenAI's and Cohere's objects, the others Workers AI's."""
    model: str
    """The caller's name for the model."""
    as_base64: bool = False
    num_dimensions: int | None = None
    """Of embeddings that are cut; None: all."""
    most: int | None = None
    """Entries of a ranking, at most; None: all."""
    pooling: str = ""
    is_response: bool = False
    """Workers AI names the embeddings `response`, as bge-m3 does for contexts; else `data`."""
    documents: tuple[str, ...] | None = None
    """The ranked texts, if the answer has them."""


class PreparedTexts(msgspec.Struct, frozen=True):
    """Texts, ready for an encoder."""

    inputs: tuple[EncoderInput, ...]
    form: EncodedForm
    pooling: str = ""
    """Asked of the model; "": the model's own."""


class PreparedBody(msgspec.Struct, frozen=True):
    form: AnswerForm
    prompts: tuple[PreparedPrompt, ...]
    converted: bytes = b""
    """The answer to a `Conversion`."""
    texts: PreparedTexts | None = None
    """Of an `EncoderBody`."""


class ParsedBody(Protocol):
    """A body that was checked as far as possible without its model."""

    @property
    def asked(self) -> Asked: ...

    def form(self, model: ModelFacts) -> AnswerForm: ...

    def requests(self, model: ModelFacts) -> Sequence[CompletionRequest | ChatRequest]:
        """Return the prompts' requests. Raise InvalidRequest for what this model cannot do."""


class Conversion(ABC):
    """A checked body that is answered by computing alone: no worker takes part."""

    @property
    @abstractmethod
    def asked(self) -> Asked: ...

    @abstractmethod
    def answer(self, model: ModelFacts, tokenizer: TextTokenizer, grammars: GrammarCheck) -> bytes:
        """Return the answer's body. Raise TandemError."""


class EncoderBody(ABC):
    """A checked body whose texts an encoder reads."""

    @property
    @abstractmethod
    def asked(self) -> Asked: ...

    @property
    @abstractmethod
    def tasks(self) -> tuple[ModelTask, ...]:
        """The tasks of models that can answer."""

    @abstractmethod
    def texts(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        """Return the texts as the model reads them. Raise InvalidRequest."""


Parsed = ParsedBody | Conversion | EncoderBody


@dataclass(frozen=True)
class Preparation:
    """What requests of one process share: checked grammars and public texts. Everything here computes."""

    grammars: GrammarCheck = field(default_factory=GrammarCheck)
    public_prefixes: PublicPrefixes | None = None

    def body(self, parsed: Parsed, model: ModelFacts, tokenizer: TextTokenizer, salt: bytes | None) -> PreparedBody:
        """Return a parsed body, prepared for its model. Raise TandemError."""
        if isinstance(parsed, Conversion):
            answer = parsed.answer(model, tokenizer, self.grammars)
            return PreparedBody(AnswerForm(parsed.asked.model), (), answer)
        if isinstance(parsed, EncoderBody):
            check_task(model, parsed.tasks)
            return PreparedBody(AnswerForm(parsed.asked.model), (), texts=parsed.texts(model, tokenizer))
        check_task(model, ("text-generation",))
        form = parsed.form(model)
        requests = parsed.requests(model)
        # One bad prompt refuses all: no prompt starts before every one is prepared.
        prompts = tuple(self.prompt(each, model, tokenizer, salt, with_text=form.echo) for each in requests)
        return PreparedBody(form, prompts)

    def prompt(
        self,
        request: CompletionRequest | ChatRequest,
        model: ModelFacts,
        tokenizer: TextTokenizer,
        salt: bytes | None,
        *,
        with_text: bool = True,
    ) -> PreparedPrompt:
        """Check the grammar, plan tools, render, tokenize and hash one prompt. Raise TandemError."""
        if request.options.grammar is not None:
            self.grammars.check(request.options.grammar, request.options.grammar_field)
        plan: ToolPlan | None = None
        if isinstance(request, ChatRequest) and request.uses_tools:
            request, plan = plan_tools(request, model, tokenizer, self.grammars)
        options = request.options
        token_ids = TokenIds(prompt_ids(request, model, tokenizer))
        seed = new_seed(options)
        split, thinking = None, None
        if isinstance(request, ChatRequest):
            has_calls = request.tools is not None
            split, thinking = plan_thinking(model, tokenizer, token_ids, options, takes_calls=has_calls)
            options = replace(options, stop_token_ids=(*options.stop_token_ids, *stop_ids_of(model, tokenizer)))
        # Also refuses a prompt that is too long.
        sampling = sampling_params(options, model, seed, len(token_ids), thinking)
        num_public = 0
        if self.public_prefixes is not None:
            num_public = self.public_prefixes.num_tokens(model, tokenizer, token_ids)
        return PreparedPrompt(
            continues_text=not isinstance(request, ChatRequest),
            token_ids=token_ids.packed(),
            wire=_wire(token_ids, options, model, salt, num_public),
            num_public_tokens=num_public,
            sampling=sampling,
            choice_seeds=tuple(choice_seed(seed, index) for index in range(options.num_choices)),
            stop=options.stop,
            cache=options.cache,
            cache_salt=options.cache_salt,
            tool_form="" if plan is None else plan.form.name,
            shown_ids=() if plan is None else tuple(plan.control_ids.values()),
            text=_text(request, tokenizer, token_ids) if with_text else None,
            thinking=split,
        )


_WORK: Mapping[ModelTask, tuple[str, str]] = {
    "text-generation": ("writes text", "send messages or a prompt, to /v1/chat/completions for example"),
    "text-embedding": ("makes embeddings", "send texts, to /v1/embeddings for example"),
    "text-classification": ("classifies texts", "send a text by `AI.run`"),
    "text-ranking": ("ranks texts", "send a query and documents, to /v1/rerank for example"),
}
"""What a model of a task does, and how it is asked."""


def check_task(model: ModelFacts, tasks: tuple[ModelTask, ...]) -> None:
    """Raise InvalidRequest for a model that does another task than the request asks for."""
    if model.task not in tasks:
        does, remedy = _WORK[model.task]
        raise InvalidRequest(
            f"{model.model_id} {does}, which is not what this request asks for; name another model, or {remedy}",
            field="model",
        )


def _wire(
    token_ids: TokenIds, options: GenerationOptions, model: ModelFacts, salt: bytes | None, num_public: int
) -> WirePrompt:
    """Hash and serialize a prompt; a request with its own salt shares no blocks, public ones included."""
    own_salt = options.cache_salt.encode()
    return wire_prompt(
        token_ids,
        identity=bytes.fromhex(model.identity),
        grain=model.hash_grain,
        salt=None if salt is None else salt + own_salt,
        num_public_tokens=0 if own_salt else num_public,
        adapter=model.adapter.digest if model.adapter is not None else "",
    )


def _text(request: CompletionRequest | ChatRequest, tokenizer: TextTokenizer, token_ids: TokenIds) -> str:
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, str):
        return request.prompt
    return tokenizer.decode(token_ids)
