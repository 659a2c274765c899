"""Samples tokens in numpy, row by row, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tandem_engine.ops.sampling import (
    MIN_TEMPERATURE,
    LogitChanges,
    Numbers,
    RowSample,
    SamplingRow,
    TokenIds,
    TokenLogprob,
    Words,
    is_plain_greedy,
    refuse,
)

Logits = np.ndarray[tuple[int], np.dtype[np.float32]]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
    """See `Ops.sample`; rows that need only the largest logit stay on their device."""
    refuse(torch.nonzero(~(logits < torch.inf).all(-1)).flatten().tolist(), [])
    largest = logits.argmax(-1)
    refuse([], torch.nonzero(logits.gather(1, largest.unsqueeze(1)).flatten() == -torch.inf).flatten().tolist())
    raw = {index: logits[index].cpu().numpy() for index, row in enumerate(rows) if not is_plain_greedy(row)}
    changed = {index: _changed(each, rows[index]) for index, each in raw.items()}
    refuse([], [index for index, each in changed.items() if each.max() == -np.inf])
    return [
        _drawn(raw[index], changed[index], row) if index in raw else RowSample([token_id] * len(row.seeds))
        for index, (row, token_id) in enumerate(zip(rows, largest.tolist(), strict=True))
    ]


def gumbel_noise(seed: int, position: int, token_ids: TokenIds, vocab_size: int) -> Numbers:
    """Return the noise of `token_ids` at `position`, float64."""
    generator = np.random.Philox(key=np.array([seed, position], np.uint64))
    bits = generator.random_raw(vocab_size)[token_ids]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0
    return -np.log(-np.log(np.minimum(uniform, 1 - 2.0**-53)))


def _changed(raw: Logits, row: SamplingRow) -> Logits:
    logits = raw if row.changes is None else _with_changes(raw, row.changes)
    return logits if row.allowed is None else np.where(_bits(row.allowed, len(logits)), logits, np.float32(-np.inf))


def _with_changes(raw: Logits, changes: LogitChanges) -> Logits:
    logits = raw.copy()
    values = logits[changes.token_ids].astype(np.float64) + changes.bias
    penalty = changes.repetition_penalty
    values = np.where(changes.is_seen, np.where(values > 0, values / penalty, values * penalty), values)
    logits[changes.token_ids] = values - changes.minus
    return logits


def _bits(words: Words, vocab_size: int) -> Any:
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), count=vocab_size, bitorder="little")
    return bits.astype(bool)


def _drawn(raw: Logits, logits: Logits, row: SamplingRow) -> RowSample:
    token_ids = [int(logits.argmax())] * len(row.seeds) if row.temperature == 0.0 else _draw_tokens(logits, row)
    if row.num_top is None:
        return RowSample(token_ids)
    logprobs = _Logprobs(raw)
    return RowSample(token_ids, [logprobs.of(token_id) for token_id in token_ids], logprobs.top(row.num_top))


def _draw_tokens(logits: Logits, row: SamplingRow) -> list[int]:
    scaled = logits.astype(np.float64) / max(row.temperature, MIN_TEMPERATURE)
    kept = _kept(scaled, row)
    return [_draw(scaled, kept, seed, row.position) for seed in row.seeds]


def _draw(scaled: Numbers, kept: TokenIds, seed: int, position: int) -> int:
    values = scaled[kept] + gumbel_noise(seed, position, kept, len(scaled))
    return int(kept[values == values.max()].min())


def _kept(scaled: Numbers, row: SamplingRow) -> TokenIds:
    """Return the tokens that top-k, top-p and min-p keep, in any order."""
    kept: TokenIds = np.flatnonzero(scaled > -np.inf)
    if row.top_k or row.top_p < 1.0:
        kept = kept[np.argsort(-scaled[kept], kind="stable")[: row.top_k or None]]
    if row.top_p < 1.0:
        masses = np.rint(np.exp(scaled[kept] - scaled[kept[0]]) * 2.0**40).astype(np.int64)
        before = np.cumsum(masses) - masses
        kept = kept[before.astype(np.float64) < row.top_p * float(masses.sum())]
    if row.min_p > 0.0:
        kept = kept[scaled[kept] >= scaled.max() + np.log(row.min_p)]
    return kept


class _Logprobs:
    """Log probabilities of one row of raw logits."""

    def __init__(self, raw: Logits) -> None:
        self._raw = raw
        highest = float(raw.max())
        self._log_sum = highest + float(np.log(np.exp(raw.astype(np.float64) - highest).sum()))

    def of(self, token_id: int) -> TokenLogprob:
        logit = self._raw[token_id]
        return TokenLogprob(token_id, float(logit) - self._log_sum, 1 + int((self._raw > logit).sum()))

    def top(self, num: int) -> list[TokenLogprob]:
        order = np.argsort(-self._raw, kind="stable")[:num]
        return [self.of(int(token_id)) for token_id in order if self._raw[token_id] > -np.inf]
