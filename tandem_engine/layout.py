"""What are other processes told of how a pool's blocks are laid out?"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupInfo:
    """Layers that share one block table."""

    layers: list[int]
    window: int | None = None
    """Positions that a token sees in each of them, itself among them; None: all."""


@dataclass(frozen=True)
class LayoutInfo:
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
    groups: list[GroupInfo] = field(default_factory=list)
    """Empty: one, that keeps the blocks of all layers."""

    @property
    def num_groups(self) -> int:
        return max(1, len(self.groups))
