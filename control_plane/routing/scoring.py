"""Scores all workers of a table at once, in numpy, and finds the worker of a key and those with the least scores.

`compiled_scoring.py` does the same in one pass of C++, where its library can be had. Scores leave out caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from control_plane.routing import rendezvous
from control_plane.routing.comparison import MAX_COMPARED
from control_plane.routing.cost_model import ASSUMED_STEP_MS, EXPECTED_ANSWER_TOKENS, CostModel, RoutingRequest
from control_plane.routing.groups import SAME_QUEUE, TIE
from control_plane.routing.hand_overs import Shown
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.worker_table import (
    BEAT,
    DELAY,
    HELD,
    LARGEST,
    MY_PROMPTS,
    MY_QUEUE,
    REPORTED,
    ROOM,
    SESSIONS,
    Bools,
    Floats,
    WorkerTable,
)

NUM_CANDIDATES = 4
"""Of a table with more workers than an explanation shows. A shorter one is compared whole."""
LIGHT_LOAD = 0.125
"""Of all pools' tokens. With less held, steps are as short as they get, and keys stay where every gateway looks."""
LAST = 1e12
"""Added to the score of workers that come after all others."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """Which workers of a table a request may go to."""

    key: int | None
    """Of the worker that other gateways would choose, too; None: none is looked for."""
    avoid: list[int]
    """Rows that get no request."""
    out: list[int]
    """In the last resort, rows that are nobody's home; else they are avoided."""
    is_new_session: bool
    """Whether the key is of a session, which has no worker yet."""
    draw: float
    """A random number, at least 0 and below 1: decides between workers that are about as good."""


class Way(msgspec.Struct, frozen=True, gc=False):
    """A hand-over to the workers of a table."""

    pairs: PairColumns
    shown: Shown
    from_host: str
    bytes_per_token: float
    prefill_ms: float
    """Until the first token."""
    is_forced: bool
    """No worker of the table may compute the prompt."""


class Scored(msgspec.Struct, frozen=True, gc=False):
    score: Floats
    """[rows]; inf: never. The table's own memory: the next scores overwrite it."""
    home: int | None
    """The row of the key's worker."""
    picked: list[int]
    """Rows of a few least scores; of a short table, all that are not inf."""


class Scoring(Protocol):
    def prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> Scored:
        """Score prefill workers by when they would have the prompt; keys are spread by their speeds."""

    def decodes(self, table: WorkerTable, request: RoutingRequest, way: Way | None, choice: Choice) -> Scored:
        """Score decode workers by when they would have prompt and answer; keys are spread by their pools.

        `way`: None: the prompt is not handed over, or the table is short. A short one is compared whole, so nobody
        reads what the prompt takes.
        """


class NumpyScoring:
    """A numpy call for each step."""

    def __init__(self, costs: CostModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._costs, self._clock = costs, clock

    def prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> Scored:
        rates = rates_of(table, self._costs)
        queued = num_queued(table, rates, self._clock())
        score = (queued + request.num_prompt_tokens) / rates
        return _scored(table, score, choice, rates, queued, same_queue(request))

    def decodes(self, table: WorkerTable, request: RoutingRequest, way: Way | None, choice: Choice) -> Scored:
        columns, num_tokens = table.columns, request.num_prompt_tokens + request.max_tokens
        score = columns[HELD] + num_tokens
        score /= table.pool_weights.of_rows
        score *= answer_ms(table, request)
        if way is None and not is_short(table):
            score += self._local_ms(table, request)
        elif way is not None:
            hand_over_ms = way.pairs.ms(way.shown, way.from_host, way.bytes_per_token)
            hand_over_ms += way.prefill_ms
            hand_over_ms = hand_over_ms.take(table.host_numbers)
            local_ms = hand_over_ms if way.is_forced else self._local_ms(table, request)
            score += np.minimum(local_ms, hand_over_ms)
        if table.least_largest < num_tokens:
            score[columns[LARGEST] < num_tokens] = np.inf
        if choice.avoid:
            score[choice.avoid] = np.inf
        are_late = columns[ROOM] < request.num_prompt_tokens
        if are_late.any() and np.min(score, where=~are_late, initial=np.inf) < np.inf:
            score[are_late] += LAST
        if way is not None:
            best = score.argmin()
            if local_ms[best] >= hand_over_ms[best]:
                score -= way.prefill_ms  # the same for all that are about as good: the rest is compared
        return _scored(table, score, choice, None, columns[HELD])

    def _local_ms(self, table: WorkerTable, request: RoutingRequest) -> Floats:
        """Return `CostModel.local_ms` of each worker, were nothing cached."""
        local_ms = table.columns[DELAY] * request.num_prompt_tokens
        local_ms += table.columns[MY_QUEUE]
        local_ms /= rates_of(table, self._costs)
        return local_ms


def _scored(
    table: WorkerTable,
    score: Floats,
    choice: Choice,
    rates: Floats | None,
    loads: Floats,
    same_load: float | None = None,
) -> Scored:
    """Find the key's worker and the least scores. `rates`: None: keys are spread by pools. `same_load`: see `pick`."""
    if choice.avoid:
        score[choice.avoid] = np.inf
    home = None
    if choice.key is not None:
        may_take: Bools = score < LAST / 2
        if choice.out:
            may_take[choice.out] = False
        weights = table.pool_weights if rates is None else table.weights(rates)
        if choice.is_new_session:
            may_take = rendezvous.with_few_sessions(may_take, weights, table.columns[SESSIONS])
        light_load = LIGHT_LOAD * weights.total if rates is None else 0.0
        home = rendezvous.home(table, choice.key, weights, loads, may_take, light_load)
    same = None if same_load is None else (loads, same_load)
    return Scored(score, home, pick(score, num_picked(table), choice.draw, same))


def rates_of(table: WorkerTable, costs: CostModel) -> Floats:
    """Return the prompt tokens per second of each worker; the mean of its peers before its first prompt."""
    return table.rates(lambda: typical_rate(table, costs))


def typical_rate(table: WorkerTable, costs: CostModel) -> float:
    return costs.typical_rate(table.key.model_id, table.key.numerics_class, table.key.role)


def num_queued(table: WorkerTable, rates: Floats, now: float) -> Floats:
    """Return `CostModel.num_queued` of each prefill worker."""
    since = now - table.columns[BEAT]
    since *= rates
    queued: Floats = np.maximum(table.columns[MY_PROMPTS], table.columns[REPORTED] - since)
    return queued


def answer_ms(table: WorkerTable, request: RoutingRequest) -> float:
    """Return what an answer takes beside as many tokens as the pool has."""
    return min(request.max_tokens, EXPECTED_ANSWER_TOKENS) * (table.step_ms or ASSUMED_STEP_MS)


def is_short(table: WorkerTable) -> bool:
    """Return whether all workers of a table are compared."""
    return len(table.incarnations) <= MAX_COMPARED


def num_picked(table: WorkerTable) -> int:
    return MAX_COMPARED if is_short(table) else NUM_CANDIDATES


def same_queue(request: RoutingRequest) -> float:
    """Return the tokens by which prefill queues may differ and are equal."""
    return SAME_QUEUE * request.num_prompt_tokens


def pick(score: Floats, number: int, draw: float, same: tuple[Floats, float] | None = None) -> list[int]:
    """Return rows of the least scores; spread over those that are about as good as the best, if they are more.

    `same`: loads, [rows], and by how much those of workers that are as good may differ, beside a share of them.
    """
    best = score.argmin()
    least = score.item(best)
    if least == math.inf:
        return []
    are_ties = score <= TIE * least
    if same is not None:
        loads, same_load = same
        are_ties &= loads <= TIE * loads.item(best) + same_load
    ties = are_ties.nonzero()[0]
    if (num_ties := len(ties)) > number:
        first, stride = int(draw * num_ties), num_ties // number  # each is as likely as others
        return [ties.item((first + each * stride) % num_ties) for each in range(number)]
    if len(score) <= number:
        return (score < np.inf).nonzero()[0].tolist()
    if number <= NUM_CANDIDATES:
        return _least(score, number)
    return [row for row in np.argpartition(score, number)[:number].tolist() if score[row] < np.inf]


def _least(score: Floats, number: int) -> list[int]:
    """Return the rows of a few least scores, in order; a third of what argpartition takes for 500 rows."""
    found: list[tuple[int, float]] = []
    for _ in range(number):
        row = int(score.argmin())
        value = score.item(row)
        if value == math.inf:
            break
        found.append((row, value))
        score[row] = np.inf
    for row, value in found:
        score[row] = value
    return [row for row, _ in found]
