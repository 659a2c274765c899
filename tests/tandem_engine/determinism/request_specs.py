"""Draws the random requests, the same for one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem_engine.grammar import Grammar
from tandem_engine.sampling_params import SamplingParams

MAX_ANSWER_TOKENS = 40
_MAX_PROMPT_TOKENS = 300
_LONG_SHARE = 0.04
_MAX_LONG_PROMPT_TOKENS = 1200
"""Attention sums its keys in parts of 512: some contexts must have more than one part."""
_FIRST_TOKEN_ID = 2
_ENDS = (0, 1, 2)
"""Tokens that end an answer in one of the models."""
_GRAMMARS = (
    *[None] * 5,
    Grammar("json_object"),
    Grammar("regex", "([a-z]{2,5}[ ,]){3,12}[.]"),
    Grammar("json_schema", '{"type":"array","items":{"enum":["a","bc",17,null]},"minItems":3,"maxItems":12}'),
)


@dataclass(frozen=True)
class RequestSpec:
    """One request, independent of the way in which it is answered."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams

    @property
    def max_kv_tokens(self) -> int:
        """Most KV slots that the request can need."""
        return len(self.prompt) + self.sampling.max_tokens


def random_specs(rng: random.Random, count: int, vocab_size: int, context_length: int) -> list[RequestSpec]:
    """Return `count` requests that fit the context."""
    return [
        RequestSpec(f"r{number}", _prompt(rng, vocab_size, context_length), _sampling(rng, vocab_size))
        for number in range(count)
    ]


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(count))


def _prompt(rng: random.Random, vocab_size: int, context_length: int) -> tuple[int, ...]:
    limit = _MAX_LONG_PROMPT_TOKENS if rng.random() < _LONG_SHARE else _MAX_PROMPT_TOKENS
    return random_tokens(rng, rng.randint(1, min(limit, context_length - MAX_ANSWER_TOKENS)), vocab_size)


def _sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = rng.randint(1, MAX_ANSWER_TOKENS)
    grammar = rng.choice(_GRAMMARS)
    ends = _ENDS if grammar else ()
    return SamplingParams(
        max_tokens=max_tokens,
        seed=rng.getrandbits(64),
        temperature=rng.choice([0.0, 0.0, 0.4, 0.8, 1.0, 1.7]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.6]),
        top_k=rng.choice([0, 0, 1, 7, 50]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1, 1.4, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5, -0.4]),
        presence_penalty=rng.choice([0.0, 0.0, 0.6, -0.3]),
        logit_bias=_logit_bias(rng, vocab_size),
        num_logprobs=rng.choice([None, None, 0, 1, 5, 20]),
        stop_token_ids=random_tokens(rng, rng.choice([0, 1, vocab_size // 40]), vocab_size) + ends,
        min_tokens=rng.choice([0, 0, rng.randint(1, max_tokens)]),
        grammar=grammar,
    )


def _logit_bias(rng: random.Random, vocab_size: int) -> dict[int, float]:
    count = rng.choice([0, 0, 1, 8])
    return {token_id: rng.uniform(-8, 8) for token_id in random_tokens(rng, count, vocab_size)}
