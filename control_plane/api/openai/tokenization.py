"""The bodies of /tokenize and /detokenize, in the form that vLLM gave them: tools count prompts with them.

Plain code: it runs in text processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

import msgspec
from pydantic import Field

from control_plane.api.chat_fields import ChatTemplateFields, Messages, Tools, messages_for_template, tool_use
from control_plane.api.generation_fields import TokenId
from control_plane.api.http.body import Body, check, parse_object, refuse_extras
from control_plane.api.http.bounds import MAX_MODEL_CHARACTERS, MAX_PROMPT_TOKENS
from control_plane.generation import ModelFacts
from control_plane.text.prepared import NOBODY, Asked, Conversion, TextJob
from control_plane.text.request import ChatRequest, CompletionRequest, check_token_ids, prompt_ids
from control_plane.text.structure import GrammarCheck
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tools.planning import plan_tools
from tandem_runtime.errors import InvalidRequest, Unsupported


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    """Tokens of prompt and answer together that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


Model = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] | None


class TokenizeBody(ChatTemplateFields):
    """Exactly one of `prompt` and `messages`."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"chat_template", "continue_final_message", "mm_processor_kwargs"}
    )

    model: Model = None
    """The model's name or alias; may be absent while one model is served."""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    """Tools that a chat offers."""
    add_special_tokens: bool | None = None
    """Begin a prompt as its completion does, with the model's first token. Without effect on messages."""
    add_generation_prompt: Annotated[bool | None, Field(json_schema_extra={"enum": [True, None]})] = None
    """End a chat with the beginning of the answer, as every chat does here."""
    return_token_strs: bool | None = None
    """Return also the text of each token."""

    def request(self) -> CompletionRequest | ChatRequest:
        """Return what is to be tokenized. Raise InvalidRequest."""
        refuse_extras(self)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send exactly one of prompt and messages", field="prompt")
        if self.add_generation_prompt is False:
            raise Unsupported(
                "add_generation_prompt: false is not supported here; leave it out", field="add_generation_prompt"
            )
        model = self.model or ""
        if self.messages is None:
            assert self.prompt is not None, "one of the two is there"
            return CompletionRequest(model, self.prompt, NOBODY)
        variables = self.template_variables
        tools = tool_use(self.tools, None, None)
        return ChatRequest(
            model, messages_for_template(self.messages), NOBODY, tools=tools, template_variables=variables
        )


class DetokenizeBody(Body):
    model: Model = None
    """The model's name or alias; may be absent while one model is served."""
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


def parse(job: TextJob, raw: bytes) -> Conversion:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    value = parse_object(raw)
    if job.endpoint == "detokenize":
        ids = check(DetokenizeBody, value)
        refuse_extras(ids)
        return Detokenization(ids)
    body = check(TokenizeBody, value)
    return Tokenization(body, body.request())


@dataclass(frozen=True)
class Tokenization(Conversion):
    body: TokenizeBody
    request: CompletionRequest | ChatRequest

    @property
    def asked(self) -> Asked:
        return Asked.of(self.request)

    def answer(self, model: ModelFacts, tokenizer: TextTokenizer, grammars: GrammarCheck) -> bytes:
        """Return `Tokenized` as JSON."""
        ids = self._ids(model, tokenizer, grammars)
        texts = b"null"
        if self.body.return_token_strs:
            texts = _array(ids, lambda piece: [tokenizer.token_bytes(each).decode(errors="replace") for each in piece])
        return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
            len(ids),
            model.context_length,
            _array(ids, list),
            texts,
        )

    def _ids(self, model: ModelFacts, tokenizer: TextTokenizer, grammars: GrammarCheck) -> Sequence[int]:
        request = self.request
        if isinstance(request, CompletionRequest) and isinstance(request.prompt, str):
            return tokenizer.encode_prompt(request.prompt, add_special_tokens=self.body.add_special_tokens is not False)
        if isinstance(request, ChatRequest) and request.uses_tools:
            request, _ = plan_tools(request, model, tokenizer, grammars)
        return prompt_ids(request, model, tokenizer)


@dataclass(frozen=True)
class Detokenization(Conversion):
    body: DetokenizeBody

    @property
    def asked(self) -> Asked:
        return Asked(self.body.model or "", "text_completion")

    def answer(self, model: ModelFacts, tokenizer: TextTokenizer, grammars: GrammarCheck) -> bytes:
        """Return `Detokenized` as JSON."""
        check_token_ids("tokens", self.body.tokens, model)
        return msgspec.json.encode({"prompt": tokenizer.decode(self.body.tokens, skip_special_tokens=False)})


_PIECE_TOKENS = 1 << 16


def _array(ids: Sequence[int], values: Callable[[Sequence[int]], list[Any]]) -> bytes:
    """Write one value for each token as a JSON array, piece by piece: memory is bounded by a piece."""
    pieces = (ids[start : start + _PIECE_TOKENS] for start in range(0, len(ids), _PIECE_TOKENS))
    return b"[" + b",".join(msgspec.json.encode(values(piece))[1:-1] for piece in pieces) + b"]"
