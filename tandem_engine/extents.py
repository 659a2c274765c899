"""Describes where the bytes of a KV block are."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class ExtentRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of one block in a mapped region; `generation` is compared with the region's table after the copy."""

    region_id: str
    offset: int
    num_bytes: int
    slot: int
    generation: int
    checksum: int = 0
    """xxh3-64 of the bytes as they were written; 0: unknown. Engines that verify compare it."""


class PrefixBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A full block of a prompt that can be copied from a mapped region."""

    index: int
    """Index into the block table of `group`."""
    extent: ExtentRef
    group: int = 0


class BlockPart(NamedTuple):
    """Tokens that one of our blocks takes from a block of another layout."""

    block: int
    first: int
    """Place of the first token in our block."""
    source_first: int
    """Place of the first token in the other block."""
    num_tokens: int
