"""Describes where the bytes of a KV block are."""

from __future__ import annotations

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
