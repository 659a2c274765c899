"""Describes the layout of a pool's blocks to other processes."""

from __future__ import annotations

import msgspec


class GroupInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table."""

    layers: list[int]
    window: int | None = None
    """Positions that a token attends to in each layer, the token itself included; None: all."""


class SourceLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What blocks of another pool may have different from ours: their other fields are those of `LayoutInfo`."""

    tokens_per_block: int
    dtype: str
    order: str
    bytes_per_block: int


class LayoutInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The groups of this pool; see KvLayout in protos/tandem/v1/types.proto."""

    num_layers: int
    """Of all groups."""
    tokens_per_block: int
    num_kv_heads: int
    k_head_size: int
    v_head_size: int
    dtype: str
    order: str
    bytes_per_block: int
    """Of one group."""
    groups: list[GroupInfo] = msgspec.field(default_factory=list)
    """Empty: one group of all layers."""

    @property
    def num_groups(self) -> int:
        return max(1, len(self.groups))
