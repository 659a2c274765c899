"""How are rows that are to be drawn from handed to the C++ sampler?"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from engine.ops.cpu.library import SamplingCall
from engine.ops.sampling import MIN_TEMPERATURE, Drawn, LogitChanges, SamplingRow, TokenLogprob, refuse

_NOT_NUMBERS, _NOTHING_LEFT = 1, 2
_WORD_BYTES = 8
"""Of a seed, a token id, a rank and a log probability alike."""


def sample(library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Drawn]:
    """See `Ops.sample`."""
    assert logits.dtype == torch.float32 and len(logits) == len(rows), "logits are float32, a row for each that draws"
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    call = _Call(rows, logits.shape[1])
    library.tandem_sample(logits.data_ptr(), logits.stride(0), logits.shape[1], ctypes.addressof(call.table), len(rows))
    return call.results()


class _Call:
    """The rows' structures, what they point to, and where results land: seed by seed, then by rank, row after row."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        self._rows = rows
        num_top = [min(row.num_top or 0, vocab_size) for row in rows]
        num_places = (len(row.seeds) + top for row, top in zip(rows, num_top, strict=True))
        self._firsts = list(accumulate(num_places, initial=0))
        first_seeds = accumulate((len(row.seeds) for row in rows), initial=0)
        self._seeds = np.array(list(chain.from_iterable(row.seeds for row in rows)), np.uint64)
        self._token_ids = np.empty(self._firsts[-1], np.int64)
        self._ranks, self._logprobs = np.empty_like(self._token_ids), np.empty(self._firsts[-1])
        self._kept_alive: list[Any] = []
        seeds, token_ids, ranks, logprobs = map(_address, (self._seeds, self._token_ids, self._ranks, self._logprobs))
        self.table = (SamplingCall * len(rows))()
        for row, top, first, first_seed, out in zip(rows, num_top, self._firsts, first_seeds, self.table, strict=False):
            out.temperature = max(row.temperature, MIN_TEMPERATURE) if row.temperature else 0.0
            out.top_k, out.top_p, out.min_p = row.top_k, row.top_p, row.min_p
            out.position = row.position
            out.seeds, out.num_seeds = seeds + first_seed * _WORD_BYTES, len(row.seeds)
            out.has_logprobs, out.num_top = row.num_top is not None, top
            place = first * _WORD_BYTES
            out.token_ids, out.ranks, out.logprobs = token_ids + place, ranks + place, logprobs + place
            if row.changes is not None:
                self._point_to_changes(row.changes, vocab_size, out)
        self._point_to_masks()

    def results(self) -> list[Drawn]:
        """Return what the rows gave. Raises UnusableLogits."""
        statuses = [each.status for each in self.table]
        if any(statuses):
            refuse(*([i for i, each in enumerate(statuses) if each == why] for why in (_NOT_NUMBERS, _NOTHING_LEFT)))
        token_ids = self._token_ids.tolist()
        return [
            self._with_logprobs(row, first, call.num_top)
            if row.num_top is not None
            else Drawn(token_ids[first : first + len(row.seeds)])
            for row, first, call in zip(self._rows, self._firsts, self.table, strict=False)
        ]

    def _with_logprobs(self, row: SamplingRow, first: int, num_top: int) -> Drawn:
        places = slice(first, first + len(row.seeds) + num_top)
        columns = (column[places].tolist() for column in (self._token_ids, self._logprobs, self._ranks))
        entries = [TokenLogprob(*each) for each in zip(*columns, strict=True)]
        chosen = entries[: len(row.seeds)]
        return Drawn([each.token_id for each in chosen], chosen, entries[len(row.seeds) :])

    def _point_to_changes(self, changes: LogitChanges, vocab_size: int, out: SamplingCall) -> None:
        token_ids, num = changes.token_ids, len(changes.token_ids)
        assert len(changes.bias) == len(changes.is_seen) == len(changes.minus) == num, "changes are equally long"
        if num and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
            raise IndexError(f"a changed logit is outside the vocabulary of {vocab_size}")
        out.changed, out.num_changed = self._pointer(token_ids, np.int64), num
        out.bias, out.minus = self._pointer(changes.bias, np.float64), self._pointer(changes.minus, np.float64)
        out.is_seen, out.repetition_penalty = self._pointer(changes.is_seen, np.bool_), changes.repetition_penalty

    def _point_to_masks(self) -> None:
        """Put all masks into one piece: an address takes Python as long as copying a hundred words."""
        pairs = zip(self.table, self._rows, strict=True)
        masked = [(out, row.allowed) for out, row in pairs if row.allowed is not None]
        if not masked:
            return
        place = self._pointer(np.concatenate([words for _, words in masked]), np.int32)
        for out, words in masked:
            out.allowed, out.num_allowed_words = place, len(words)
            place += words.nbytes

    def _pointer(self, numbers: Any, dtype: Any) -> int:
        whole = np.ascontiguousarray(numbers, dtype)
        self._kept_alive.append(whole)
        return _address(whole)


def _address(array: Any) -> int:
    address: int = array.ctypes.data
    return address
