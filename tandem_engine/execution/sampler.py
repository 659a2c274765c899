"""Samples the next tokens of requests.

Sampling is a pure function of logits, sampling parameters, tokens before, seed and position; other requests have no
influence. This module turns penalties and bans, which depend on the tokens before, into changes of logits. The op does
all the rest, see tandem_engine/ops/sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import Logprob, PositionLogprobs
from tandem_engine.ops import plain_sampling
from tandem_engine.ops.plain_sampling import gumbel_noise
from tandem_engine.ops.sampling import LogitChanges, RowSample, SamplingRow, TokenLogprob, UnusableLogits, Words
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Sampled

__all__ = ["Draw", "gumbel_noise", "sample"]

SampleOp = Callable[[torch.Tensor, Sequence[SamplingRow]], list[RowSample]]
"""`Ops.sample` of a backend."""


class Draw(NamedTuple):
    """One request's next token: one per seed, all from the same logits. With drafts: its next tokens."""

    request_id: str
    params: SamplingParams
    seeds: Sequence[int]
    token_ids: Sequence[int]
    """All tokens before; their number is the position of the token to sample."""
    num_prompt_tokens: int
    draft_tokens: Sequence[int] = ()
    """Drafts of the next tokens, with one seed: one more row of logits per draft."""
    allowed: Sequence[Words | None] = ()
    """The tokens that are allowed in each row, up to the first draft that is forbidden; None, or no entry: all."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_tokens)

    def token_ids_behind(self, num_drafts: int) -> Sequence[int]:
        """Return all tokens before the token that follows `num_drafts` accepted drafts."""
        return [*self.token_ids, *self.draft_tokens[:num_drafts]] if num_drafts else self.token_ids

    def num_answer_tokens(self, num_drafts: int) -> int:
        return len(self.token_ids) + num_drafts - self.num_prompt_tokens


def sample(
    logits: torch.Tensor, draws: Sequence[Draw], sample_op: SampleOp = plain_sampling.sample
) -> dict[str, list[Sampled]]:
    """Sample tokens from `logits` [rows of all draws, vocab_size]; return them by request id.

    Returns one token per seed; with drafts the accepted drafts and the token that follows them. So every token is the
    same as without drafts. Raises RequestsFailed with the requests whose logits are NaN or infinite, or whose tokens
    are all banned.
    """
    if not draws:
        return {}
    vocab_size = logits.shape[-1]
    rows = [_row(draw, index, vocab_size) for draw in draws for index in range(draw.num_rows)]
    row_samples, message = _row_samples(logits.float(), rows, sample_op)
    taken: dict[str, list[Sampled]] = {}
    failed: list[str] = []
    first = 0
    for draw in draws:
        sampled = _taken(draw, row_samples[first : first + draw.num_rows])
        if sampled is None:
            failed.append(draw.request_id)
        else:
            taken[draw.request_id] = sampled
        first += draw.num_rows
    if failed:
        raise RequestsFailed(failed, message)
    return taken


def _row_samples(
    logits: torch.Tensor, rows: Sequence[SamplingRow], sample_op: SampleOp
) -> tuple[list[RowSample | None], str]:
    """Return the sample of each row, None for unusable logits, and a message about these."""
    try:
        return [*sample_op(logits, rows)], ""
    except UnusableLogits as error:  # rare: once more, without the rows that cannot be used
        messages = [error.message]
        usable = [row for row in range(len(rows)) if row not in error.rows]
    row_samples: list[RowSample | None] = [None] * len(rows)
    while usable:
        try:
            found = sample_op(logits[usable], [rows[row] for row in usable])
        except UnusableLogits as error:  # try again with the other rows, which may fail for another reason
            messages.append(error.message)
            usable = [row for index, row in enumerate(usable) if index not in error.rows]
        else:
            for row, each in zip(usable, found, strict=True):
                row_samples[row] = each
            break
    return row_samples, "; ".join(messages)


def _taken(draw: Draw, row_samples: Sequence[RowSample | None]) -> list[Sampled] | None:
    """Return a request's tokens up to the first that differs from its draft; None if a row before has no sample."""
    if not draw.draft_tokens:
        return None if row_samples[0] is None else _sampled(row_samples[0])
    sampled: list[Sampled] = []
    for each, draft in zip(row_samples, [*draw.draft_tokens, None], strict=True):
        if each is None:
            return None
        sampled += _sampled(each)
        if sampled[-1].token_id != draft:
            break
    return sampled


def _row(draw: Draw, num_drafts: int, vocab_size: int) -> SamplingRow:
    """Return how the token behind `num_drafts` drafts is sampled."""
    params = draw.params
    return SamplingRow(
        seeds=draw.seeds,
        position=len(draw.token_ids) + num_drafts,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        changes=_changes(draw, num_drafts, vocab_size) if _changes_logits(draw, num_drafts) else None,
        allowed=draw.allowed[num_drafts] if num_drafts < len(draw.allowed) else None,
        num_top=params.num_logprobs,
    )


def _sampled(row_samples: RowSample) -> list[Sampled]:
    if not row_samples.chosen:
        return [Sampled(token_id) for token_id in row_samples.token_ids]
    top = [_logprob(entry) for entry in row_samples.top]
    return [Sampled(entry.token_id, PositionLogprobs(_logprob(entry), top)) for entry in row_samples.chosen]


def _logprob(entry: TokenLogprob) -> Logprob:
    return Logprob(entry.token_id, entry.logprob, entry.rank)


def _changes_logits(draw: Draw, num_drafts: int) -> bool:
    params = draw.params
    has_penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(has_penalties or params.logit_bias or _bans_stop_tokens(draw, num_drafts))


def _bans_stop_tokens(draw: Draw, num_drafts: int) -> bool:
    """Whether the answer must not end yet; it may end if its grammar allows nothing else."""
    params = draw.params
    allowed = draw.allowed[num_drafts] if num_drafts < len(draw.allowed) else None
    if allowed is None and params.grammar is not None and params.thinking is not None:
        return True  # within the thinking: what has the grammar is still to come
    if draw.num_answer_tokens(num_drafts) >= params.min_tokens:
        return False
    if allowed is None:
        return True
    others = allowed.astype(np.uint32)
    for token_id in draw.params.stop_token_ids:
        if token_id // 32 < len(others):
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return bool(others.any())


def _changes(draw: Draw, num_drafts: int, vocab_size: int) -> LogitChanges:
    params = draw.params
    token_ids = draw.token_ids_behind(num_drafts)
    seen = _ids(token_ids if params.repetition_penalty != 1.0 else (), vocab_size)
    is_penalised = params.frequency_penalty or params.presence_penalty  # these count only the answer's tokens
    answer = np.array(token_ids[draw.num_prompt_tokens :] if is_penalised else (), np.int64)
    counted = _ids(answer, vocab_size)
    biased = _ids(tuple(params.logit_bias), vocab_size)
    banned = _ids(params.stop_token_ids if _bans_stop_tokens(draw, num_drafts) else (), vocab_size)
    changed = _ids(np.concatenate((seen, counted, biased, banned)), vocab_size)
    bias, is_seen, minus = np.zeros(len(changed)), np.zeros(len(changed), np.bool_), np.zeros(len(changed))
    bias[changed.searchsorted(biased)] = [params.logit_bias[token_id] for token_id in biased.tolist()]
    is_seen[changed.searchsorted(seen)] = True
    counts = np.bincount(answer)[counted]
    minus[changed.searchsorted(counted)] = params.frequency_penalty * counts + params.presence_penalty
    minus[changed.searchsorted(banned)] = np.inf
    return LogitChanges(changed, bias, is_seen, minus, params.repetition_penalty)


def _ids(token_ids: Any, vocab_size: int) -> Any:
    """Return the different ids within the vocabulary, int64, ascending."""
    ids = np.asarray(token_ids, np.int64)
    is_there = np.zeros(vocab_size, np.bool_)  # faster than sorting a long context
    is_there[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.flatnonzero(is_there)
