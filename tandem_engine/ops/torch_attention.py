"""Computes paged attention in plain torch; a token's bits depend on its position and its keys alone.

Every product has one shape. Queries are cut into tiles and keys into parts at fixed absolute positions. So a token has
the same row of the same tile in a decode and in every chunk; missing rows are padding.

    scores of one tile and one part    [num_kv_heads, tile * group, head_dim] x [num_kv_heads, head_dim, part]

The largest score over all parts is exact in any order; sums then run from the first part to the last. A part that a
token does not see adds zeros, so the result does not depend on whether the token's tile visits that part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tandem_engine.ops.base import KVPool, Run, Step
from tandem_engine.ops.rowwise import softcap_

_ROWS_PER_TILE = 16
_KEYS_PER_PART = 128


@dataclass(frozen=True)
class AttentionCall:
    """The parameters of one layer's attention."""

    num_heads: int
    scale: float
    window: int | None
    softcap: float | None

    def first_key(self, position: int) -> int:
        """Return the first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class TorchStep(Step):
    """A step with the data that its layers share."""

    masks: dict[tuple[int, int, int, int | None], torch.Tensor | None] = field(default_factory=dict)
    """Keys that a tile must not see, by the tile's first position and size, the part's first position, and window."""


@dataclass(frozen=True)
class _Keys:
    """A run's keys and values of one layer, from the part of the first key that the run sees."""

    first_part: int
    part_size: int
    keys: torch.Tensor
    """[num_parts, num_kv_heads, head_dim, part_size], float32."""
    values: torch.Tensor
    """[num_parts, num_kv_heads, part_size, head_dim], float32, zero where the run sees nothing."""


def attend(query: torch.Tensor, step: TorchStep, pool: KVPool, layer: int, call: AttentionCall) -> torch.Tensor:
    """Return the attention output of each token, [num_tokens, num_heads * head_dim], float32, run by run."""
    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    for run in step.runs:
        rows = slice(run.row, run.row + run.num_tokens)
        output[rows] = _attend_run(query[rows], run, step, pool, layer, call)
    return output


def part_size(block_size: int) -> int:
    """Return the keys per part: whole blocks, 128 keys if the block size divides 128."""
    return block_size * max(1, _KEYS_PER_PART // block_size)


def _attend_run(
    query: torch.Tensor, run: Run, step: TorchStep, pool: KVPool, layer: int, call: AttentionCall
) -> torch.Tensor:
    group = call.num_heads // pool.num_kv_heads
    tile = max(1, _ROWS_PER_TILE // group)
    first = run.start // tile * tile
    end = run.start + run.num_tokens
    keys = _gather(run, pool, layer, call)
    padded = functional.pad(query * call.scale, (0, 0, run.start - first, -end % tile))  # [tiles * tile, heads * dim]
    tiles = padded.view(-1, tile, pool.num_kv_heads, group, pool.head_dim).transpose(1, 2)
    tiles = tiles.reshape(-1, pool.num_kv_heads, tile * group, pool.head_dim)
    gathered = torch.stack([_attend_tile(q, first + i * tile, tile, keys, step, call) for i, q in enumerate(tiles)])
    by_token = gathered.view(-1, pool.num_kv_heads, tile, group, pool.head_dim).transpose(1, 2)
    return by_token.reshape(len(padded), -1)[run.start - first :][: run.num_tokens]


def _gather(run: Run, pool: KVPool, layer: int, call: AttentionCall) -> _Keys:
    """Copy the blocks that the run sees, padded to whole parts; blocks before its window are not read."""
    end = run.start + run.num_tokens
    size = part_size(pool.block_size)
    first_block = call.first_key(run.start) // pool.block_size
    first_part = first_block * pool.block_size // size
    blocks_per_part = size // pool.block_size
    num_blocks_before = first_block - first_part * blocks_per_part
    needed = run.blocks[first_block : -(-end // pool.block_size)]
    num_blocks_after = -(num_blocks_before + len(needed)) % blocks_per_part
    # Padding repeats blocks of the run itself: their keys are masked, their values zeroed.
    blocks = torch.cat((needed[:1].expand(num_blocks_before), needed, needed[:1].expand(num_blocks_after)))
    heads = torch.arange(pool.num_kv_heads, device=blocks.device)
    row_of_keys = ((blocks * pool.num_layers + layer) * (2 * pool.num_kv_heads)).unsqueeze(1) + heads  # [blocks, heads]
    table = pool.rows.view(-1, pool.head_dim * pool.block_size)  # (block, layer, key or value, head) by row
    # An embedding look-up copies rows twice as fast as indexing the pool's dimensions does.
    keys = functional.embedding(row_of_keys, table).float()
    values = functional.embedding(row_of_keys + pool.num_kv_heads, table).float()
    by_part = (-1, blocks_per_part, pool.num_kv_heads)
    keys = keys.view(*by_part, pool.head_dim, pool.block_size).permute(0, 2, 3, 1, 4).flatten(3)
    values = values.view(*by_part, pool.block_size, pool.head_dim).transpose(1, 2).flatten(2, 3)
    values[0, :, : num_blocks_before * pool.block_size] = 0
    values[-1, :, end - (first_part + len(values) - 1) * size :] = (
        0  # else NaN of an earlier owner would give 0 * NaN = NaN
    )
    return _Keys(first_part, size, keys.contiguous(), values.contiguous())


def _attend_tile(
    query: torch.Tensor, first: int, tile: int, keys: _Keys, step: TorchStep, call: AttentionCall
) -> torch.Tensor:
    """Return [num_kv_heads, tile * group, head_dim] for scaled `query` of that shape, at positions from `first` on."""
    last_part = (first + tile - 1) // keys.part_size - keys.first_part
    first_part = call.first_key(first) // keys.part_size - keys.first_part
    parts = range(max(0, first_part), min(last_part + 1, len(keys.keys)))
    scores = [_scores(query, first, tile, keys, part, step, call) for part in parts]
    greatest = scores[0].amax(-1, keepdim=True)
    for score in scores[1:]:
        greatest = torch.maximum(greatest, score.amax(-1, keepdim=True))
    total = torch.zeros_like(greatest)
    gathered = torch.zeros_like(query)
    for part, score in zip(parts, scores, strict=True):
        weights = score.sub_(greatest).exp_()
        total += weights.sum(-1, keepdim=True)
        gathered += torch.bmm(weights, keys.values[part])
    return gathered / total


def _scores(
    query: torch.Tensor, first: int, tile: int, keys: _Keys, part: int, step: TorchStep, call: AttentionCall
) -> torch.Tensor:
    """Return [num_kv_heads, tile * group, part_size], minus infinity where a token does not see a key."""
    scores = torch.bmm(query, keys.keys[part])
    if call.softcap is not None:
        softcap_(scores, call.softcap)
    hidden = _hidden(step, first, tile, (keys.first_part + part) * keys.part_size, keys.part_size, call)
    if hidden is not None:
        by_token = scores.view(len(scores), tile, -1, keys.part_size)
        by_token.masked_fill_(hidden.unsqueeze(1), -math.inf)
    return scores


def _hidden(
    step: TorchStep, first: int, tile: int, first_key: int, num_keys: int, call: AttentionCall
) -> torch.Tensor | None:
    """Return which keys of a part the tokens of a tile do not see, bool [tile, num_keys]; None: they see all."""
    name = (first, tile, first_key, call.window)
    if name not in step.masks:
        positions = torch.arange(first, first + tile, device=step.positions.device).unsqueeze(1)
        keys = torch.arange(first_key, first_key + num_keys, device=step.positions.device)
        hidden = keys > positions
        if call.window is not None:
            hidden |= keys <= positions - call.window
        sees_all = first_key + num_keys - 1 <= first and call.first_key(first + tile - 1) <= first_key
        step.masks[name] = None if sees_all else hidden
    return step.masks[name]
