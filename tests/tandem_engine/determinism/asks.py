"""Draws the random requests, the same for one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem_engine.scheduling.grammar import Grammar
from tandem_engine.scheduling.sampling_params import SamplingParams

MAX_ANSWER_TOKENS = 40
_MAX_PROMPT_TOKENS = 300
_LONG_SHARE = 0.04
_MAX_LONG_PROMPT_TOKENS = 1200
"""Attention adds up its keys in parts of 512: some contexts must have more than one."""
_FIRST_TOKEN_ID = 2
_ENDS = (0, 1, 2)
"""Tokens that end an answer of one of the models."""
_GRAMMARS = (
    *[None] * 5,
    Grammar("json_object"),
    Grammar("regex", "([a-z]{2,5}[ ,]){3,12}[.]"),
    Grammar("json_schema", '{"type":"array","items":{"enum":["a","bc",17,null]},"minItems":3,"maxItems":12}'),
)


@dataclass(frozen=True)
class Ask:
    """One request, whichever way it is answered."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams

    @property
    def max_kv_tokens(self) -> int:
        """Most slots that it can come to need."""
        return len(self.prompt) + self.sampling.max_tokens


def random_asks(chance: random.Random, count: int, vocab_size: int, context_length: int) -> list[Ask]:
    """Return `count` requests that fit the context."""
    return [
        Ask(f"r{number}", _prompt(chance, vocab_size, context_length), _sampling(chance, vocab_size))
        for number in range(count)
    ]


def random_tokens(chance: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(count))


def _prompt(chance: random.Random, vocab_size: int, context_length: int) -> tuple[int, ...]:
    limit = _MAX_LONG_PROMPT_TOKENS if chance.random() < _LONG_SHARE else _MAX_PROMPT_TOKENS
    return random_tokens(chance, chance.randint(1, min(limit, context_length - MAX_ANSWER_TOKENS)), vocab_size)


def _sampling(chance: random.Random, vocab_size: int) -> SamplingParams:
    max_tokens = chance.randint(1, MAX_ANSWER_TOKENS)
    grammar = chance.choice(_GRAMMARS)
    ends = _ENDS if grammar else ()
    return SamplingParams(
        max_tokens=max_tokens,
        seed=chance.getrandbits(64),
        temperature=chance.choice([0.0, 0.0, 0.4, 0.8, 1.0, 1.7]),
        top_p=chance.choice([1.0, 1.0, 0.95, 0.6]),
        top_k=chance.choice([0, 0, 1, 7, 50]),
        min_p=chance.choice([0.0, 0.0, 0.02, 0.2]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.1, 1.4, 0.9]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.5, -0.4]),
        presence_penalty=chance.choice([0.0, 0.0, 0.6, -0.3]),
        logit_bias=_logit_bias(chance, vocab_size),
        num_logprobs=chance.choice([None, None, 0, 1, 5, 20]),
        stop_token_ids=random_tokens(chance, chance.choice([0, 1, vocab_size // 40]), vocab_size) + ends,
        min_tokens=chance.choice([0, 0, chance.randint(1, max_tokens)]),
        grammar=grammar,
    )


def _logit_bias(chance: random.Random, vocab_size: int) -> dict[int, float]:
    count = chance.choice([0, 0, 1, 8])
    return {token_id: chance.uniform(-8, 8) for token_id in random_tokens(chance, count, vocab_size)}
