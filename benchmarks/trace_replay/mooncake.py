"""Reads a Mooncake trace, scaled down to a small machine. Pure.

A line of the trace is an object with `input_length`, `output_length` (tokens) and `hash_ids`, one per block of 512
tokens. Lengths are divided by 64, rounded down, so a block of 512 tokens becomes one of 8, full blocks stay full and
the last one stays partial or goes. The tokens of a block are a function of its hash id: prompts that begin with the
same hash ids begin with the same tokens, and others do not.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

SCALE = 64
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = TRACE_BLOCK_TOKENS // SCALE
_NUM_SPECIAL_TOKENS = 2
"""The first token ids of the random models: beginning and end of a text."""


@dataclass(frozen=True)
class TraceRequest:
    """One request, scaled."""

    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens <= BLOCK_TOKENS * len(self.hash_ids):
            raise ValueError(
                f"a prompt of {self.num_prompt_tokens} tokens has {len(self.hash_ids)} hash ids; "
                f"one per {BLOCK_TOKENS} tokens is wanted, is it a Mooncake trace?"
            )

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the prompt."""
        blocks = (block_tokens(hash_id, vocab_size) for hash_id in self.hash_ids)
        return [token for block in blocks for token in block][: self.num_prompt_tokens]


def read_requests(lines: Iterable[str]) -> list[TraceRequest]:
    """Read a trace's lines, scaled; a prompt and an answer have one token at least."""
    return [
        TraceRequest(
            num_prompt_tokens=max(1, entry["input_length"] // SCALE),
            num_output_tokens=max(1, entry["output_length"] // SCALE),
            hash_ids=tuple(entry["hash_ids"]),
        )
        for entry in map(json.loads, lines)
    ]


@functools.lru_cache(maxsize=1 << 18)
def block_tokens(hash_id: int, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a block, always the same for a hash id."""
    chance = random.Random(hash_id)
    return tuple(chance.randrange(_NUM_SPECIAL_TOKENS, vocab_size) for _ in range(BLOCK_TOKENS))
