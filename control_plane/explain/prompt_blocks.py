"""Samples the block hashes of a prompt, so that an exported trace shows which prompts begin alike.

A hash depends on the account's secret salt and on all tokens before its end. An explanation keeps 8 of its 16 bytes,
for each 512 tokens; `tandem trace export` writes numbers in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAMPLE_TOKENS = 512
"""As in Mooncake's traces."""
_HASH_BYTES = 16
_KEPT_BYTES = 8
_MAX_SAMPLES = 256
"""4 KiB of the 16 of an explanation; the first 131,072 tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The hashes at the ends of a prompt's blocks of `num_tokens`, 8 bytes each; the first 256."""

    num_tokens: int
    packed: bytes

    @classmethod
    def of(cls, packed_hashes: bytes, grain: int) -> PromptBlocks:
        """Sample a chain of hashes of 16 bytes, one for each `grain` tokens."""
        num_grains = max(1, SAMPLE_TOKENS // grain)
        step = num_grains * _HASH_BYTES
        starts = range(step - _HASH_BYTES, len(packed_hashes), step)[:_MAX_SAMPLES]
        kept = b"".join(packed_hashes[start : start + _KEPT_BYTES] for start in starts)
        return cls(num_grains * grain, kept)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PromptBlocks:
        """Read what `to_json` wrote; raises KeyError, TypeError or ValueError."""
        return cls(int(value["num_tokens"]), bytes.fromhex(value["hashes"]))

    @property
    def hashes(self) -> list[bytes]:
        return [self.packed[start : start + _KEPT_BYTES] for start in range(0, len(self.packed), _KEPT_BYTES)]

    def to_json(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "hashes": self.packed.hex()}
