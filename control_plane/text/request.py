"""Requests to the text pipeline, and how they become token ids and sampling parameters.

A value that the caller did not send comes from the model's own defaults, then from the endpoint's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from control_plane.accounts.identity import Caller
from control_plane.generation import EVERYTHING, CachePolicy, ModelFacts
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tool import ToolUse
from tandem_engine.grammar import Grammar
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.thinking import Thinking
from tandem_runtime.errors import ContextTooLong, InvalidRequest

_SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate. None means not sent: then the model's default holds, then the endpoint's."""

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """The endpoint's default; None for the rest of the context."""
    temperature: float | None = None
    default_temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_choices: int = 1
    num_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None
    """The grammar that the answer must match."""
    max_thinking_tokens: int | None = None
    """Tokens of the thinking, after which it must end; None: no limit."""
    grammar_field: str = "response_format"
    """The request's field that has the grammar, for error messages."""
    cache: CachePolicy = EVERYTHING
    cache_salt: str = ""
    """The prompt's cache is shared with the account's requests that have the same salt."""


@dataclass(frozen=True)
class CompletionRequest:
    model: str
    prompt: str | tuple[int, ...]
    caller: Caller
    options: GenerationOptions = GenerationOptions()
    control_tokens: bool = False
    """Whether names of control tokens in the prompt are control tokens: the prompt is in the model's own format."""


@dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: tuple[Mapping[str, Any], ...]
    caller: Caller
    options: GenerationOptions = GenerationOptions()
    tools: ToolUse | None = None
    """Tools that the answer may call; None for none."""
    template_tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the chat template renders."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, by name."""

    @property
    def uses_tools(self) -> bool:
        """Whether the chat has tools, or messages with calls or their results."""
        return self.tools is not None or any(
            message["role"] == "tool" or message.get("tool_calls") for message in self.messages
        )


def session_key(account: str, model_id: str, session_id: str) -> str:
    """Return the key of a session, which only its account can name; "" for no session.

    Equal ids of two accounts, or for two models, are different sessions. Every key has 32 characters.
    """
    if not session_id:
        return ""
    parts = (part.encode(errors="replace") for part in (account, model_id, session_id))
    framed = b"".join(len(part).to_bytes(4) + part for part in parts)
    return blake2b(framed, digest_size=16, person=b"session").hexdigest()


def choice_seed(seed: int, choice_index: int) -> int:
    """Return the seed of one choice. Choice 0 has the request's seed, the others have seeds derived from it."""
    if choice_index == 0:
        return seed
    return int.from_bytes(blake2b(seed.to_bytes(8) + choice_index.to_bytes(4), digest_size=8).digest())


def new_seed(options: GenerationOptions) -> int:
    return secrets.randbits(64) if options.seed is None else options.seed % 2**64


def sampling_params(
    options: GenerationOptions, model: ModelFacts, seed: int, num_prompt_tokens: int, thinking: Thinking | None = None
) -> SamplingParams:
    """Return how to sample an answer. Raise InvalidRequest."""
    defaults = model.generation_defaults
    top_p = _first(options.top_p, defaults.get("top_p"), 1.0)
    if options.grammar is not None and options.ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be used with structured output or tools, which define the end; leave it out",
            field="ignore_eos",
        )
    check_token_ids("logit_bias", tuple(options.logit_bias), model)
    check_token_ids("stop_token_ids", options.stop_token_ids, model)
    try:
        return SamplingParams(
            max_tokens=_max_tokens(options, model, num_prompt_tokens),
            seed=seed,
            temperature=_first(options.temperature, defaults.get("temperature"), options.default_temperature),
            top_p=max(top_p, _SMALLEST_TOP_P) if top_p == 0 else top_p,  # OpenAI's 0 means the likeliest token only
            top_k=int(_first(options.top_k, defaults.get("top_k"), 0)),
            min_p=options.min_p,
            repetition_penalty=_first(options.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            logit_bias=options.logit_bias,
            num_logprobs=options.num_logprobs,
            stop_token_ids=stop_token_ids(options, model),
            min_tokens=options.min_tokens,
            grammar=options.grammar,
            thinking=thinking,
        )
    except ValueError as error:
        raise InvalidRequest(str(error), field=str(error).split(" ")[0]) from error


def _max_tokens(options: GenerationOptions, model: ModelFacts, num_prompt_tokens: int) -> int:
    """Return the maximum number of tokens of the answer: as requested, limited by the rest of the context.

    A prompt that fills the context still gets one token: this token is sampled, and its KV is never computed.
    """
    room = max(1, model.context_length - num_prompt_tokens)
    if num_prompt_tokens > model.context_length:
        raise ContextTooLong(
            f"prompt has {num_prompt_tokens:,} tokens, {model.model_id} takes {model.context_length:,} for prompt and "
            f"answer together; shorten the prompt by at least {num_prompt_tokens - model.context_length:,}",
            field="prompt",
        )
    requested = _first(
        options.max_tokens, model.generation_defaults.get("max_tokens"), options.default_max_tokens or room
    )
    return min(int(requested), room)


def stop_token_ids(options: GenerationOptions, model: ModelFacts) -> tuple[int, ...]:
    eos = () if options.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*eos, *options.stop_token_ids)))


def check_token_ids(name: str, token_ids: Sequence[int], model: ModelFacts) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{name} has token id {token_id}, {model.model_id} has 0 to {model.vocab_size - 1}", field=name
            )


def _first(*values: float | None) -> float:
    """Return the first value that is not None; the last value never is."""
    return next(value for value in values if value is not None)


def prompt_ids(request: CompletionRequest | ChatRequest, model: ModelFacts, tokenizer: TextTokenizer) -> Sequence[int]:
    """Return a prompt or a rendered chat as token ids. Raise InvalidRequest."""
    if isinstance(request, CompletionRequest):
        return _completion_ids(request, model, tokenizer)
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message", field="messages")
    if not model.chat_template:
        raise InvalidRequest(f"{model.model_id} has no chat template; send a prompt instead", field="messages")
    template = ChatTemplate(model.chat_template, tokenizer.special_tokens)
    check = partial(_check_length, model, tokenizer)
    return tokenizer.encode_chat(template, request.messages, request.template_tools, request.template_variables, check)


def _completion_ids(request: CompletionRequest, model: ModelFacts, tokenizer: TextTokenizer) -> Sequence[int]:
    if not request.prompt:
        raise InvalidRequest("prompt is empty; send at least one character or token id", field="prompt")
    if isinstance(request.prompt, str):
        _check_length(model, tokenizer, request.prompt)
        return tokenizer.encode_prompt(request.prompt, control_tokens=request.control_tokens)
    check_token_ids("prompt", request.prompt, model)
    return request.prompt


def _check_length(model: ModelFacts, tokenizer: TextTokenizer, text: str) -> None:
    """Raise ContextTooLong if a text cannot fit the context, whatever its tokens are: that needs no tokenizing."""
    if len(text) <= model.context_length or tokenizer.max_token_bytes is None:
        return
    num_bytes = len(text.encode(errors="surrogatepass"))
    most = model.context_length * tokenizer.max_token_bytes
    if num_bytes > most:
        raise ContextTooLong(
            f"prompt has {num_bytes:,} bytes of text, {model.model_id} takes {model.context_length:,} tokens for "
            f"prompt and answer together, which are {most:,} bytes at most; shorten the prompt",
            field="prompt",
        )
