"""Passes sampling rows to the C++ sampler."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem_engine.ops.sampling import MIN_TEMPERATURE, LogitChanges, RowSample, SamplingRow, TokenLogprob, refuse

_NOT_NUMBERS, _NOTHING_LEFT = 1, 2
_WORD_BYTES = 8
"""Size of a seed, a token id, a rank, a log probability, and of each field of a call."""
_CALL = struct.Struct("=4d17q")  # SamplingRow in cpp/sampling.hpp
_NUM_TOP, _STATUS, _NUM_FIELDS = 16, 20, 21  # indices and count of a call's fields


class _Changes(NamedTuple):
    """The fields of a call that change logits: addresses and lengths, 0 if unchanged."""

    repetition_penalty: float = 0.0
    token_ids: int = 0
    bias: int = 0
    is_seen: int = 0
    minus: int = 0
    num: int = 0


_UNCHANGED = _Changes()


class Sampler:
    """Samples through the library, from one thread. The buffers of calls and results are reused."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._num_rows = self._num_places = 0
        self._reserve(1, 1)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        """See `Ops.sample`."""
        if not rows:
            return []
        assert logits.dtype == torch.float32 and len(logits) == len(rows), "logits are float32, one row per call"
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        vocab_size = logits.shape[1]
        firsts = self._write(rows, vocab_size)
        self._library.tandem_sample(logits.data_ptr(), logits.stride(0), vocab_size, self._calls_at, len(rows))
        return self._results(rows, firsts)

    def _reserve(self, num_rows: int, num_places: int) -> None:
        """Make room for `num_rows` calls, and for `num_places` seeds and likeliest tokens in all."""
        if num_rows > self._num_rows:
            self._num_rows = 2 * num_rows
            self._calls = bytearray(self._num_rows * _CALL.size)
            self._calls_at = ctypes.addressof(ctypes.c_char.from_buffer(self._calls))
            self._fields = memoryview(self._calls).cast("q")
        if num_places > self._num_places:
            self._num_places = 2 * num_places
            self._seeds = np.empty(self._num_places, np.uint64)
            self._token_ids, self._ranks = np.empty((2, self._num_places), np.int64)
            self._logprobs = np.empty(self._num_places)
            columns = (self._seeds, self._token_ids, self._ranks, self._logprobs)
            self._seeds_at, self._token_ids_at, self._ranks_at, self._logprobs_at = map(_address, columns)

    def _write(self, rows: Sequence[SamplingRow], vocab_size: int) -> list[int]:
        """Write a call for each row; return the index of each row's first result: by seed, then by rank."""
        top = [min(row.num_top or 0, vocab_size) for row in rows]
        self._reserve(len(rows), sum(len(row.seeds) for row in rows) + sum(top))
        seeds = list(chain.from_iterable(row.seeds for row in rows))
        self._seeds[: len(seeds)] = np.array(seeds, np.uint64)
        self._kept_alive: list[Any] = []
        masks_at = self._place_masks(rows)
        firsts = []
        first = first_seed = 0
        for index, (row, num_top) in enumerate(zip(rows, top, strict=True)):
            changes = _UNCHANGED if row.changes is None else self._place_changes(row.changes, vocab_size)
            num_words = 0 if row.allowed is None else len(row.allowed)
            firsts.append(first)
            _CALL.pack_into(
                self._calls,
                index * _CALL.size,
                max(row.temperature, MIN_TEMPERATURE) if row.temperature else 0.0,
                row.top_p,
                row.min_p,
                changes.repetition_penalty,
                row.top_k,
                row.position,
                self._seeds_at + first_seed * _WORD_BYTES,
                len(row.seeds),
                *changes[1:],
                0 if row.allowed is None else masks_at,
                num_words,
                row.num_top is not None,
                num_top,
                self._token_ids_at + first * _WORD_BYTES,
                self._ranks_at + first * _WORD_BYTES,
                self._logprobs_at + first * _WORD_BYTES,
                0,
            )
            masks_at += num_words * 4
            first_seed += len(row.seeds)
            first += len(row.seeds) + num_top
        return firsts

    def _results(self, rows: Sequence[SamplingRow], firsts: Sequence[int]) -> list[RowSample]:
        """Return the results of the rows. Raises UnusableLogits."""
        statuses = self._fields[_STATUS : len(rows) * _NUM_FIELDS : _NUM_FIELDS].tolist()
        if any(statuses):
            refuse(*([i for i, each in enumerate(statuses) if each == why] for why in (_NOT_NUMBERS, _NOTHING_LEFT)))
        token_ids = self._token_ids[: firsts[-1] + len(rows[-1].seeds)].tolist()
        return [
            RowSample(token_ids[first : first + len(row.seeds)])
            if row.num_top is None
            else self._with_logprobs(row, first, self._fields[index * _NUM_FIELDS + _NUM_TOP])
            for index, (row, first) in enumerate(zip(rows, firsts, strict=True))
        ]

    def _with_logprobs(self, row: SamplingRow, first: int, num_top: int) -> RowSample:
        places = slice(first, first + len(row.seeds) + num_top)
        columns = (column[places].tolist() for column in (self._token_ids, self._logprobs, self._ranks))
        entries = [TokenLogprob(*each) for each in zip(*columns, strict=True)]
        chosen = entries[: len(row.seeds)]
        return RowSample([each.token_id for each in chosen], chosen, entries[len(row.seeds) :])

    def _place_changes(self, changes: LogitChanges, vocab_size: int) -> _Changes:
        token_ids, num = changes.token_ids, len(changes.token_ids)
        assert len(changes.bias) == len(changes.is_seen) == len(changes.minus) == num, "changes are equally long"
        if num and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
            raise IndexError(f"a changed logit is outside the vocabulary of {vocab_size}")
        return _Changes(
            changes.repetition_penalty,
            self._place(token_ids, np.int64),
            self._place(changes.bias, np.float64),
            self._place(changes.is_seen, np.bool_),
            self._place(changes.minus, np.float64),
            num,
        )

    def _place_masks(self, rows: Sequence[SamplingRow]) -> int:
        """Concatenate all masks: in Python, taking an address costs as much as copying a hundred words."""
        masks = [row.allowed for row in rows if row.allowed is not None]
        return self._place(np.concatenate(masks), np.int32) if masks else 0

    def _place(self, numbers: Any, dtype: Any) -> int:
        whole = np.ascontiguousarray(numbers, dtype)
        self._kept_alive.append(whole)
        return _address(whole)


def _address(array: Any) -> int:
    address: int = array.ctypes.data
    return address
