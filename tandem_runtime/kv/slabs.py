"""Computes which blocks of a prompt are handed over, and which of them a reader still misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb


def first_handed_over(group: pb.KvGroup, num_tokens: int) -> int:
    """Return the first block of a prompt that the next token attends to in a group's layers."""
    return max(0, num_tokens - group.window + 1) // group.tokens_per_block if group.window else 0


def trim_slab(slab: kv.Slab, first_block: int, max_blocks: int = 0) -> kv.Slab | None:
    """Return `slab` without the blocks before `first_block` (in the block table); None if nothing is left.

    With `max_blocks`, at most so many blocks are left.
    """
    num_dropped = max(0, first_block - slab.first_block)
    if num_dropped >= slab.num_blocks:
        return None
    end = min(slab.num_blocks, num_dropped + max_blocks) if max_blocks else slab.num_blocks
    if end - num_dropped == slab.num_blocks:
        return slab
    return kv.Slab(
        index=slab.index,
        group=slab.group,
        first_block=slab.first_block + num_dropped,
        num_blocks=end - num_dropped,
        first_layer=slab.first_layer,
        num_layers=slab.num_layers,
        extents=slab.extents[num_dropped:end],
        checksums=slab.checksums[num_dropped:end],
    )


def first_missing_block(
    slabs: Sequence[kv.Slab], layout: pb.KvLayout, num_tokens: int, first_needed: int, num_blocks: int
) -> int | None:
    """Return the first block in [first_needed, num_blocks) with layers in no slab; None if there is none.

    In groups with a window, only blocks from `first_handed_over` of a prompt of `num_tokens` on are needed.
    """
    for index, group in enumerate(layout.groups):
        first_block = max(first_needed, first_handed_over(group, num_tokens))
        of_group = [slab for slab in slabs if slab.group == index]
        if all(slab.num_layers == len(group.layers) for slab in of_group):
            missing = _first_gap(of_group, first_block, num_blocks)
        else:
            missing = _first_unfinished(of_group, len(group.layers), first_block, num_blocks)
        if missing is not None:
            return missing
    return None


def _first_gap(slabs: Sequence[kv.Slab], first_block: int, num_blocks: int) -> int | None:
    """Return the first block that no slab has, where each slab has all layers."""
    reached = first_block
    for slab in sorted(slabs, key=lambda slab: slab.first_block):
        if slab.first_block > reached:
            break
        reached = max(reached, slab.first_block + slab.num_blocks)
    return reached if reached < num_blocks else None


def _first_unfinished(slabs: Sequence[kv.Slab], num_layers: int, first_block: int, num_blocks: int) -> int | None:
    """Return the first block of which the slabs have too few layers.

    Walks the slabs' ends in order, so that the cost depends on the number of slabs: `num_blocks` is the writer's word.
    """
    changes: Counter[int] = Counter()
    for slab in slabs:
        changes[slab.first_block] += slab.num_layers
        changes[slab.first_block + slab.num_blocks] -= slab.num_layers
    reached, num_found = first_block, 0
    for block in sorted(changes):
        if num_found < num_layers and reached < min(block, num_blocks):
            return reached
        reached = max(reached, block)
        num_found += changes[block]
    return reached if reached < num_blocks else None
