"""Names the blocks of a chain that other processes are told of: sample points.

A block's hash covers all tokens before it, so whoever has a sample point has the chain up to there. A pool tells of the
last full blocks of prompts and answers, too (`KVCacheManager`).
"""

from __future__ import annotations

_LEAST_TOKENS = 16
_SPACING_TOKENS = 256

NUM_KEY_BYTES = 8
"""Of a block's key, in messages about sample points."""


def is_sample_point(num_tokens: int) -> bool:
    """Return whether the block that ends with the first `num_tokens` is one: at 16, 32, 64, 128, and each 256 tokens.

    With 16 tokens a block these are the blocks 1, 2, 4 and 8, then each 16th.
    """
    if num_tokens % _SPACING_TOKENS == 0:
        return num_tokens > 0
    return _LEAST_TOKENS <= num_tokens < _SPACING_TOKENS and num_tokens & (num_tokens - 1) == 0
