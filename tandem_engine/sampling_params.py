"""Defines the parameters that decide the next token of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tandem_engine.grammar import Grammar
from tandem_engine.thinking import Thinking

MAX_LOGPROBS = 20
"""Most alternatives per position, as in OpenAI's API."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds everything besides weights and tokens that decides a token.

    Raises ValueError that names the field, its value and its limits.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer (Keskar et al., 2019)."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """Frequency and presence penalties count tokens of the answer only, as in OpenAI's API."""
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None
    """None: no log probabilities; 0: only the sampled token's; n: also those of the n most likely tokens."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens cannot be sampled before the answer has this many tokens, unless the grammar allows nothing else."""
    grammar: Grammar | None = None
    """Constrains the answer's text; None: no constraint."""
    thinking: Thinking | None = None
    """The thinking before the answer, if the grammar is to begin after it, or its tokens are limited."""

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("seed", self.seed, 0, 2**64 - 1)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.num_logprobs is not None:
            _within("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias.items():
            _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ValueError unless low <= value <= high (low < value with `open_low`) and value is a number."""
    fits = not math.isnan(value) and (low < value if open_low else low <= value) and value <= high
    if not fits:
        raise ValueError(f"{name} is {value}, must be {'above' if open_low else 'from'} {low} to {high}")
