"""Plans the calls of SDPA for one step: decodes of similar length share a call, every longer run has its own.

A plan is made once in a step for each window, on the host, and serves all layers with this window. Its numbers reach
the device in one copy that nothing waits for.

    decodes    [n, heads, 1, dim] x [n, num_keys]: contexts of one call differ by less than a factor of two, and a mask
               hides the padding; a call without padding has no mask
    a chunk    [heads, num_tokens, dim] x [num_keys]: causal, aligned at the last key; with a mask only where a window
               ends inside the chunk's context
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from tandem_engine.ops.base import Integers, KVPool, Step

MAX_GATHERED_TOKENS = 65_536
"""Keys that one call attends to, padding included, unless one run has more."""
_SHORT_TOKENS = 256
"""Contexts up to this length share a call, whatever their lengths."""


@dataclass(frozen=True)
class Decodes:
    """Runs of one token each, in one call."""

    rows: slice | torch.Tensor
    """Their places in the step's token dimension."""
    num_runs: int
    blocks: torch.Tensor
    """[num_runs * blocks per run], int64; a run with fewer repeats its last block."""
    keys: slice
    """Of the keys in a run's blocks, those that the call attends to."""
    bias: torch.Tensor | None
    """[num_runs, 1, 1, num_keys], 0 or minus infinity for a key that the run does not see; None: it sees all."""


@dataclass(frozen=True)
class Chunk:
    """A run of several tokens."""

    rows: slice
    """Their places in the step's token dimension."""
    blocks: torch.Tensor
    """[num_blocks], int64."""
    keys: slice
    """Of the keys in its blocks, those that some token of the chunk sees; the last is that of the last token."""
    window: int | None
    """None: a token sees all of `keys` up to its own."""
    dtype: torch.dtype
    """Of keys and queries."""

    @property
    def is_square(self) -> bool:
        """Whether `keys` are those of the chunk's own tokens."""
        return bool(self.keys.stop - self.keys.start == self.rows.stop - self.rows.start)

    @cached_property
    def bias(self) -> torch.Tensor:
        """[num_tokens, num_keys], 0 or minus infinity for a key that the token does not see."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.blocks.device)
        places = keys[self.rows.start - self.rows.stop :].unsqueeze(1)  # of the tokens
        seen = keys <= places
        if self.window is not None:
            seen &= keys > places - self.window
        return _bias(seen, self.dtype)


@dataclass(frozen=True)
class Plan:
    decodes: Sequence[Decodes]
    chunks: Sequence[Chunk]


@dataclass(frozen=True)
class SdpaStep(Step):
    """A step with what its layers share."""

    plans: dict[int | None, Plan] = field(default_factory=dict)
    """By window; all layers share block size and dtype."""
    places: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """At most one: block and place in the block of each token."""

    def plan(self, window: int | None, pool: KVPool) -> Plan:
        if window not in self.plans:
            self.plans[window] = _plan(self, window, pool.block_size, pool.rows.dtype)
        return self.plans[window]

    def begun_blocks(self, block_size: int) -> torch.Tensor | None:
        """Return the blocks whose first token is in this step, int64; None: there are none."""
        _, start, num_tokens, first = self.table.T
        from_index, to_index = first - (-start // block_size), first - (-(start + num_tokens) // block_size)
        indices = np.concatenate([np.arange(*bounds) for bounds in zip(from_index, to_index, strict=True)])
        return self.blocks.index_select(0, _uploaded(indices, self.blocks.device)) if len(indices) else None

    def place(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.places:
            blocks = torch.div(self.slots, block_size, rounding_mode="floor")
            self.places.append((blocks, self.slots - blocks * block_size))
        return self.places[0]


def _plan(step: Step, window: int | None, block_size: int, dtype: torch.dtype) -> Plan:
    is_decode = step.table[:, 2] == 1
    decodes = _decodes(step, step.table[is_decode], window, block_size, dtype)
    chunks = [_chunk(step, run, window, block_size, dtype) for run in step.table[~is_decode].tolist()]
    return Plan(decodes, chunks)


@dataclass(frozen=True)
class _Call:
    """Numbers of one call of decodes, on the host; all [num_runs]."""

    rows: Integers
    first: Integers
    """Where a run's blocks begin in the step's."""
    num_blocks: Integers
    low: Integers
    high: Integers
    """The keys that are seen, counted from the first block on."""

    def indices(self) -> Integers:
        """Return where each run's blocks are in the step's, the last repeated: [num_runs, most blocks]."""
        index = np.arange(self.num_blocks.max())
        return self.first[:, None] + np.minimum(index, self.num_blocks[:, None] - 1)

    def is_padded(self) -> bool:
        return bool((self.low != self.low[0]).any() or (self.high != self.high[0]).any())


def _decodes(step: Step, table: Integers, window: int | None, block_size: int, dtype: torch.dtype) -> list[Decodes]:
    calls = list(_calls(table, window, block_size))
    numbers = [np.concatenate((call.indices().ravel(), call.rows, call.low, call.high)) for call in calls]
    if not calls:
        return []
    everything = _uploaded(np.concatenate(numbers), step.blocks.device)
    starts = [0, *accumulate(map(len, numbers))]
    return [
        _on_device(step, call, everything[start:], block_size, dtype)
        for call, start in zip(calls, starts, strict=False)
    ]


def _calls(table: Integers, window: int | None, block_size: int) -> Iterator[_Call]:
    """Yield the calls; runs of one call keep their order."""
    row, start, _, first = table.T
    seen_from = np.zeros_like(start) if window is None else np.maximum(0, start - window + 1)
    first_block = seen_from // block_size
    num_blocks = start // block_size + 1 - first_block
    low = seen_from - first_block * block_size
    high = start + 1 - first_block * block_size
    octave = np.ceil(np.log2(np.maximum(num_blocks, -(-_SHORT_TOKENS // block_size)))).astype(np.int64)
    for each in np.unique(octave).tolist():
        (members,) = np.nonzero(octave == each)
        most = max(1, MAX_GATHERED_TOKENS // (int(num_blocks[members].max()) * block_size))
        for begin in range(0, len(members), most):
            part = members[begin : begin + most]
            yield _Call(row[part], first[part] + first_block[part], num_blocks[part], low[part], high[part])


def _on_device(step: Step, call: _Call, numbers: torch.Tensor, block_size: int, dtype: torch.dtype) -> Decodes:
    num_runs, num_blocks = len(call.rows), int(call.num_blocks.max())
    sizes = [num_runs * num_blocks, num_runs, num_runs, num_runs]
    indices, rows, low, high = torch.split(numbers[: sum(sizes)], sizes)
    keys, bias = slice(int(call.low[0]), int(call.high[0])), None
    if call.is_padded():
        keys = slice(0, num_blocks * block_size)
        key = torch.arange(keys.stop, device=numbers.device)
        seen = (key >= low.unsqueeze(1)) & (key < high.unsqueeze(1))
        bias = _bias(seen, dtype).view(num_runs, 1, 1, -1)
    first_row = int(call.rows[0])
    is_adjacent = bool((call.rows == np.arange(first_row, first_row + num_runs)).all())
    return Decodes(
        slice(first_row, first_row + num_runs) if is_adjacent else rows,
        num_runs,
        step.blocks.index_select(0, indices),
        keys,
        bias,
    )


def _chunk(step: Step, run: Sequence[int], window: int | None, block_size: int, dtype: torch.dtype) -> Chunk:
    row, start, num_tokens, first = run
    end = start + num_tokens
    first_key = 0 if window is None else max(0, start - window + 1)
    first_block = first_key // block_size
    blocks = step.blocks[first + first_block : first - (-end // block_size)]
    keys = slice(first_key - first_block * block_size, end - first_block * block_size)
    is_causal = window is None or end <= window  # no window ends inside
    return Chunk(slice(row, row + num_tokens), blocks, keys, None if is_causal else window, dtype)


def _bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what SDPA adds to scores; made of a bool by SDPA itself, it would be made in every layer.

    Rows are padded in memory: SDPA copies a bias whose rows do not begin at multiples of 16 bytes.
    """
    num_rows, num_keys = seen.shape
    padded = torch.zeros(num_rows, -(-num_keys // 16) * 16, dtype=dtype, device=seen.device)
    return padded[:, :num_keys].masked_fill_(~seen, -torch.inf)


def _uploaded(numbers: Integers, device: torch.device) -> torch.Tensor:
    here = torch.from_numpy(numbers)
    if device.type == "cuda":  # torch keeps the pinned memory until the copy is over
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
