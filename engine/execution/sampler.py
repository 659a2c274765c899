"""Which token comes next?

A pure function of (logits, sampling parameters, tokens before, seed, position): no state, no neighbours.

    raw logits -> log probabilities -> bias -> penalties -> no stop tokens before min_tokens
               -> greedy: argmax, the lowest id on ties
               -> else: temperature -> top-k -> top-p -> min-p -> plus Gumbel noise -> argmax

Noise is counter-based (Salmon et al., 2011): Philox keyed by (seed, position of the token to be drawn), its n-th output
for token id n. An argmax over logits plus Gumbel noise is a draw from their softmax (Maddison et al., 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.core import RequestsFailed
from engine.messages import Logprob, PositionLogprobs
from engine.scheduling.request import Sampled
from engine.scheduling.sampling_params import SamplingParams

Row = np.ndarray[tuple[int], np.dtype[np.float64]]
TokenIds = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Draw:
    """One request's next token: one per seed, all from the same logits."""

    request_id: str
    params: SamplingParams
    seeds: Sequence[int]
    token_ids: Sequence[int]
    """Everything before; its length is the position of the token to be drawn."""
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> dict[str, list[Sampled]]:
    """Draw tokens from `logits` [len(draws), vocab_size]; raises RequestsFailed naming requests with NaN logits."""
    logits = logits.float()
    _refuse_nan(logits, draws)
    greedy_ids = logits.argmax(dim=-1).tolist()
    return {
        draw.request_id: [Sampled(token_id)] * len(draw.seeds)
        if _is_plain_greedy(draw)
        else _sample_row(logits[row].double().cpu().numpy(), draw)
        for row, (draw, token_id) in enumerate(zip(draws, greedy_ids, strict=True))
    }


def gumbel_noise(seed: int, position: int, token_ids: TokenIds, vocab_size: int) -> Row:
    """Return the noise of `token_ids` at `position`, float64."""
    generator = np.random.Philox(key=np.array([seed, position], np.uint64))
    bits = generator.random_raw(vocab_size)[token_ids]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0 or 1
    return -np.log(-np.log(uniform))


def _refuse_nan(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    if (broken := torch.isnan(logits).any(dim=-1)).any():
        request_ids = [draw.request_id for draw, is_broken in zip(draws, broken.tolist(), strict=True) if is_broken]
        raise RequestsFailed(request_ids, "the model's logits are not numbers (NaN)")


def _is_plain_greedy(draw: Draw) -> bool:
    return draw.params.is_greedy and draw.params.num_logprobs is None and not _changes_logits(draw)


def _changes_logits(draw: Draw) -> bool:
    params = draw.params
    has_penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(params.logit_bias or has_penalties or draw.num_answer_tokens < params.min_tokens)


def _sample_row(raw: Row, draw: Draw) -> list[Sampled]:
    logits = _changed_logits(raw, draw) if _changes_logits(draw) else raw
    chosen = [int(logits.argmax())] * len(draw.seeds) if draw.params.is_greedy else _draw_tokens(logits, draw)
    if draw.params.num_logprobs is None:
        return [Sampled(token_id) for token_id in chosen]
    ranking = _LogprobRanking(raw, draw.params.num_logprobs)
    return [Sampled(token_id, ranking.of(token_id)) for token_id in chosen]


def _draw_tokens(logits: Row, draw: Draw) -> list[int]:
    token_ids, scaled = _candidates(logits / draw.params.temperature, draw.params)
    position = len(draw.token_ids)
    noises = (gumbel_noise(seed, position, token_ids, len(logits)) for seed in draw.seeds)
    return [int(token_ids[(scaled + noise).argmax()]) for noise in noises]


def _candidates(scaled: Row, params: SamplingParams) -> tuple[TokenIds, Row]:
    """Return what top-k, top-p and min-p leave, by falling logit where they sort at all."""
    token_ids: TokenIds = np.flatnonzero(scaled > -np.inf)
    scaled = scaled[token_ids]
    if params.top_k or params.top_p < 1.0:
        order = np.argsort(-scaled, kind="stable")[: params.top_k or None]  # ties: the lower id first
        token_ids, scaled = token_ids[order], scaled[order]
    if params.top_p < 1.0:
        probabilities = np.exp(scaled - scaled[0])
        before = np.cumsum(probabilities) - probabilities
        num_kept = max(1, int((before < params.top_p * probabilities.sum()).sum()))
        token_ids, scaled = token_ids[:num_kept], scaled[:num_kept]
    if params.min_p > 0.0:
        is_kept = scaled >= scaled.max() + np.log(params.min_p)
        token_ids, scaled = token_ids[is_kept], scaled[is_kept]
    return token_ids, scaled


def _changed_logits(raw: Row, draw: Draw) -> Row:
    logits, params = raw.copy(), draw.params
    for token_id, bias in params.logit_bias.items():
        if token_id < len(logits):
            logits[token_id] += bias
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(draw.token_ids, np.int64))
        logits[seen] = np.where(
            logits[seen] > 0, logits[seen] / params.repetition_penalty, logits[seen] * params.repetition_penalty
        )
    if params.frequency_penalty or params.presence_penalty:
        answer: Any = np.array(draw.token_ids[draw.num_prompt_tokens :], np.int64)
        token_ids, counts = np.unique(answer, return_counts=True)
        logits[token_ids] -= params.frequency_penalty * counts + params.presence_penalty
    if draw.num_answer_tokens < params.min_tokens:
        logits[[token_id for token_id in params.stop_token_ids if token_id < len(logits)]] = -np.inf
    return logits


class _LogprobRanking:
    """Log probabilities of one row of raw logits."""

    def __init__(self, raw: Row, num_top: int) -> None:
        highest = raw.max()
        self._logprobs: Row = raw - (highest + np.log(np.exp(raw - highest).sum()))
        order = np.argsort(-raw, kind="stable")[:num_top] if num_top else ()
        self._top = [self._logprob(int(token_id)) for token_id in order]

    def of(self, token_id: int) -> PositionLogprobs:
        return PositionLogprobs(self._logprob(token_id), self._top)

    def _logprob(self, token_id: int) -> Logprob:
        """Rank 1 is the likeliest; equals share the better rank."""
        logprob = self._logprobs[token_id]
        return Logprob(token_id, float(logprob), 1 + int((self._logprobs > logprob).sum()))
