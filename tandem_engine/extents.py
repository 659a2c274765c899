"""Where do a block's bytes lie?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExtentRef:
    """One block's bytes in a mapped region; `generation` is compared with the region's table after the copy."""

    region_id: str
    offset: int
    num_bytes: int
    slot: int
    generation: int
    checksum: int = 0
    """xxh3-64 of the bytes as they were written; 0: not known. Compared by engines that verify."""


@dataclass(frozen=True)
class PrefixBlock:
    """A full block of a prompt, number `index` of its group's block table, that lies ready in a mapped region."""

    index: int
    extent: ExtentRef
    group: int = 0
