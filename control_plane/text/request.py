"""What does a face ask of the text pipeline, and which `TokenRequest` comes of it?

A value that the caller did not give comes from the model's own defaults, then from the face's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from control_plane.accounts.gate import Identity
from control_plane.cache_policy import EVERYTHING, CachePolicy
from control_plane.generation import ModelDescription, TokenRequest
from control_plane.text.tools.tool import ToolUse
from tandem_engine.scheduling.grammar import Grammar
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_runtime.errors import ContextTooLong, InvalidRequest

_SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True)
class Caller:
    """Who asks, and what they want besides text."""

    request_id: str
    account: str = "default"
    session_affinity: str = ""
    reject_if_busy: bool = False
    timeout_seconds: float | None = None
    """None: the service's own, which is also the longest."""
    identity: Identity | None = None
    """Who was let in; None: nobody asks for tokens, and nobody is limited."""
    answer_headers: dict[str, str] = field(default_factory=dict, compare=False)
    """What the answer's head is to say besides, as it becomes known."""


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate; None is "not said": then the model's own default holds, then the face's."""

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """The face's default; None: what the prompt leaves of the context."""
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
    """What the answer's text must look like."""
    grammar_field: str = "response_format"
    """Where the request asks for that."""
    cache: CachePolicy = EVERYTHING
    cache_salt: str = ""
    """Only requests of the same account with the same salt share the prompt's cache; "" with all of the account."""


@dataclass(frozen=True)
class CompletionRequest:
    model: str
    prompt: str | tuple[int, ...]
    caller: Caller
    options: GenerationOptions = GenerationOptions()
    control_tokens: bool = False
    """The prompt is written in the model's own format: names of control tokens in it are control tokens."""


@dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: tuple[Mapping[str, Any], ...]
    caller: Caller
    options: GenerationOptions = GenerationOptions()
    tools: ToolUse | None = None
    """Those that the answer may call."""
    template_tools: tuple[Mapping[str, Any], ...] = ()
    """Those that the chat template is told of."""


def token_request(
    request: CompletionRequest | ChatRequest,
    model: ModelDescription,
    token_ids: list[int],
    deadline: float,
    num_public_tokens: int = 0,
) -> TokenRequest:
    options, caller = request.options, request.caller
    seed = secrets.randbits(64) if options.seed is None else options.seed % 2**64
    return TokenRequest(
        request_id=caller.request_id,
        account=caller.account,
        model_id=model.model_id,
        token_ids=tuple(token_ids),
        sampling=_sampling(options, model, seed, len(token_ids)),
        choice_seeds=tuple(choice_seed(seed, index) for index in range(options.num_choices)),
        deadline=deadline,
        salt=options.cache_salt.encode(),
        cache=options.cache,
        num_public_tokens=num_public_tokens,
        fairness_key=caller.account,
        session_affinity=caller.session_affinity,
        reject_if_busy=caller.reject_if_busy,
    )


def choice_seed(seed: int, choice_index: int) -> int:
    """Return the seed of one choice: choice 0 is what the request would give alone, the others are independent."""
    if choice_index == 0:
        return seed
    return int.from_bytes(blake2b(seed.to_bytes(8) + choice_index.to_bytes(4), digest_size=8).digest())


def _sampling(options: GenerationOptions, model: ModelDescription, seed: int, num_prompt_tokens: int) -> SamplingParams:
    defaults = model.generation_defaults
    top_p = _first(options.top_p, defaults.get("top_p"), 1.0)
    if options.grammar is not None and options.ignore_eos:
        raise InvalidRequest(
            "ignore_eos: an answer with a structure ends where that ends; leave it out", field="ignore_eos"
        )
    check_token_ids("logit_bias", tuple(options.logit_bias), model)
    check_token_ids("stop_token_ids", options.stop_token_ids, model)
    try:
        return SamplingParams(
            max_tokens=_max_tokens(options, model, num_prompt_tokens),
            seed=seed,
            temperature=_first(options.temperature, defaults.get("temperature"), options.default_temperature),
            top_p=max(top_p, _SMALLEST_TOP_P) if top_p == 0 else top_p,  # OpenAI's 0 is "only the likeliest"
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
        )
    except ValueError as error:
        raise InvalidRequest(str(error), field=str(error).split(" ")[0]) from error


def _max_tokens(options: GenerationOptions, model: ModelDescription, num_prompt_tokens: int) -> int:
    """Return how many tokens the answer may have: as asked, but never more than the context has room for.

    A prompt that fills the context still gets one token: it is sampled and never has to be computed itself.
    """
    room = max(1, model.context_length - num_prompt_tokens)
    if num_prompt_tokens > model.context_length:
        raise ContextTooLong(
            f"prompt has {num_prompt_tokens:,} tokens, {model.model_id} takes {model.context_length:,} for prompt and "
            f"answer together; shorten the prompt by at least {num_prompt_tokens - model.context_length:,}",
            field="prompt",
        )
    asked = _first(options.max_tokens, model.generation_defaults.get("max_tokens"), options.default_max_tokens or room)
    return min(int(asked), room)


def stop_token_ids(options: GenerationOptions, model: ModelDescription) -> tuple[int, ...]:
    eos = () if options.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*eos, *options.stop_token_ids)))


def check_token_ids(name: str, token_ids: tuple[int, ...], model: ModelDescription) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{name} has token id {token_id}, {model.model_id} knows 0 to {model.vocab_size - 1}", field=name
            )


def _first(*values: float | None) -> float:
    """Return the first value that was given; the last one always is."""
    return next(value for value in values if value is not None)
