"""Predicts how long each worker needs for a prompt, from measured speeds and the prefix index.

Speeds are measured on earlier requests. The assumptions below hold until the first request has ended.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.block_stores import NOTHING_CACHED, BlockStores, PromptCaches
from control_plane.routing.hand_overs import HandOverCost, HandOvers, Shown, shown
from control_plane.routing.prefill_rates import PrefillRates
from control_plane.routing.prefix_index import CachedPrefix, PrefixMatch
from control_plane.routing.sample_points import SamplePointIndex
from tandem.v1 import types_pb2 as pb

HandOver = Literal["if_cheaper", "always", "never"]

ASSUMED_STEP_MS = 50.0
EXPECTED_ANSWER_TOKENS = 256
"""Steps of an answer for which the load of its decode worker counts; the answer may be longer."""
_ASSUMED_TOKENS_PER_SECOND = 1000.0
_LATE_LOADS = 4.0
"""A worker waits so many times as long for another host's blocks as is predicted."""
_OLD_WEIGHT = 0.8
"""Weight of earlier measurements in a moving average."""
_OLD_WEIGHT_OF_PEERS = 0.98
_TOKENS_OF_PEERS = 2_048
"""What a worker computed lately counts beside so many tokens at its peers' speed.

A step takes a while however few its tokens are, so a worker that got shorter prompts looks slower than its equals. By
its own prompts alone, whichever got the first new sessions would get nearly all.
"""
_FORGET_SECONDS = 300.0
"""So long counts what a decode worker showed, and then its peers' mean: one that looked slow gets no other prompts."""
_TYPICAL_SECONDS = 0.5
"""How long a mean over all workers is cached: workers report each second, and every request needs the mean."""
SHARE_OF_OTHERS = 0.5
"""A running answer that waits for another request's prompt costs half as much as that prompt.

At least one answer is counted: an idle decode worker may get an answer at any moment, and stays free for it if prefill
computes the prompt.
"""

_PREFILL = pb.WORKER_ROLE_PREFILL
_Mean = tuple[str, str, pb.WorkerRole.ValueType]
"""Of what: prompts or answers; and of which workers."""
_Peers = tuple[str, str, pb.WorkerRole.ValueType]
"""Of a model, a numerics class and a role."""


class _Computed(NamedTuple):
    """Prompts that were computed lately, older ones with less weight."""

    num_tokens: float
    seconds: float
    at: float
    """When the last one came."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The facts of a request that decide its route."""

    model_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[bytes] = ()
    """Of each `grain` tokens; empty if no cache may hold the prompt."""
    grain: int = 1
    session_id: str = ""
    hand_over: HandOver = "if_cheaper"
    """Whether a prefill worker computes the prompt: always for a probe, never for a choice that moves."""
    num_choices: int = 1
    identity: bytes = b""
    """Of the model that the prompt was tokenized for; b"": whatever the workers have."""
    preferred_class: str = ""
    """The numerics class that the answer so far is of; "": any."""
    preferred_space: bytes = b""
    """The space of the blocks that wait for a reader; b"": any."""


@dataclass
class InFlight:
    """Tokens and answers that this gateway has sent to workers and that have not ended; by incarnation.

    Heartbeats alone are up to a second old: a burst would all go to one worker.
    """

    prefill_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens to compute before the first token is sampled, at prefill and decode workers."""
    decode_tokens: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with an incarnation after each change of its counts."""
        self._listeners.append(listener)

    def changed(self, incarnation: str) -> None:
        for listener in self._listeners:
            listener(incarnation)

    def add(
        self, incarnation: str, *, num_prefill_tokens: int = 0, num_decode_tokens: int = 0, num_answers: int = 0
    ) -> InFlightEntry:
        """Count a call; the entry subtracts it again."""
        self.prefill_tokens[incarnation] += num_prefill_tokens
        self.decode_tokens[incarnation] += num_decode_tokens
        self.answers[incarnation] += num_answers
        self.changed(incarnation)
        return InFlightEntry(self, incarnation, num_prefill_tokens, num_decode_tokens, num_answers)

    def total(self) -> int:
        return self.prefill_tokens.total() + self.decode_tokens.total() + self.answers.total()


@dataclass(eq=False)
class InFlightEntry:
    """What one call added to the counts; subtracts each part once."""

    _in_flight: InFlight
    _incarnation: str
    _num_prefill_tokens: int
    _num_decode_tokens: int
    _num_answers: int

    def prompt_read(self) -> None:
        """Subtract the prompt: the worker has computed it, or never will."""
        _subtract(self._in_flight.prefill_tokens, self._incarnation, self._num_prefill_tokens)
        self._num_prefill_tokens = 0
        self._in_flight.changed(self._incarnation)

    def remove(self) -> None:
        """Subtract all that is left."""
        self.prompt_read()
        _subtract(self._in_flight.decode_tokens, self._incarnation, self._num_decode_tokens)
        _subtract(self._in_flight.answers, self._incarnation, self._num_answers)
        self._num_decode_tokens = self._num_answers = 0
        self._in_flight.changed(self._incarnation)


class PrefillEstimate(msgspec.Struct, frozen=True, gc=False):
    """The predicted cost of computing or loading one prompt's KV cache at one worker."""

    worker: Worker
    cached: CachedPrefix
    """Tokens, as the index has them; the times below include how often the index was right lately."""
    num_computed_tokens: int
    queue_ms: float
    load_ms: float
    compute_ms: float

    @property
    def wait_ms(self) -> float:
        """Return the milliseconds until the worker computes the first token."""
        return self.queue_ms + self.load_ms

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.load_ms + self.compute_ms

    def __str__(self) -> str:
        return (
            f"{self.worker.worker_id} in {self.total_ms:.1f} ms (queue {self.queue_ms:.1f}, load {self.load_ms:.1f}, "
            f"compute {self.compute_ms:.1f}; cached {self.cached.own} own, {self.cached.host} host, "
            f"{self.cached.remote} remote, {self.num_computed_tokens} to compute)"
        )


class Means(Protocol):
    """What is usual among the workers of a model and role that requests may go to; None: nothing is known."""

    def prompt_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None: ...

    def answer_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None: ...


class CostModel:
    """Predicts costs, and learns from the ledgers of requests. Forgets a worker with its incarnation."""

    def __init__(
        self,
        registry: WorkerRegistry,
        in_flight: InFlight,
        prefixes: SamplePointIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._in_flight = in_flight
        self._prefixes = prefixes
        self._clock = clock
        self.stores = BlockStores(registry, clock)
        self.hand_overs = HandOvers(registry, clock)
        self._prefill_rates = PrefillRates(registry)
        self._typical_rates: dict[_Mean, tuple[float, float]] = {}
        self._computed: dict[str, _Computed] = {}
        """Of the prompts that each decode worker computed."""
        self._computed_by_peers: dict[_Peers, _Computed] = {}
        """The same of all of a model, a numerics class and a role."""
        self._answers_of_others: dict[str, int] = {}
        """Other gateways' answers at each worker, as of its last report."""
        self._listeners: list[Callable[[str], None]] = []
        self._means: Means
        registry.listen(self._changed)
        registry.listen_to_loads(self._heard)

    def ask_means(self, means: Means) -> None:
        """Take from the columns what is usual among a model's workers."""
        self._means = means

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with an incarnation whose measured rate has changed."""
        self._listeners.append(listener)

    # ----------------------------------------------------------------------------------------------- predicting

    def match(self, request: RoutingRequest, space: bytes) -> PrefixMatch:
        """Return where the prompt's leading blocks are, of a space; the last token is always computed."""
        num_useful = (request.num_prompt_tokens - 1) // request.grain
        hashes = request.block_hashes
        match = self._prefixes.find(hashes if len(hashes) <= num_useful else hashes[:num_useful], space)
        return self.stores.usable(match)

    def estimate(self, worker: Worker, request: RoutingRequest, match: PrefixMatch) -> PrefillEstimate:
        """Predict when a worker would have the whole prompt, after the prompts that wait there already."""
        return self.estimates([worker], request, self.caches(request, match))[0]

    def caches(self, request: RoutingRequest, match: PrefixMatch) -> PromptCaches | None:
        """Return what workers find of the prompt; None: nothing is cached."""
        return self.stores.caches(match, request.grain, request.num_prompt_tokens)

    def estimates(
        self, workers: Sequence[Worker], request: RoutingRequest, caches: PromptCaches | None
    ) -> list[PrefillEstimate]:
        """Return the same as `estimate` for several workers of one role."""
        if not workers:
            return []
        cached, num_missing, load_ms = NOTHING_CACHED, max(1, request.num_prompt_tokens), 0.0
        is_prefill, typical = workers[0].role == _PREFILL, 0.0
        num_mine = self._in_flight.prefill_tokens.get  # `[]` of a Counter is slow if it has none
        reported, computed = self._prefill_rates.rates, self._computed
        estimates = []
        for worker in workers:
            incarnation, figures = worker.incarnation, worker.figures
            if is_prefill:
                rate = reported.get(incarnation)
            else:
                rate = self.computed_rate(worker) if incarnation in computed else None
            if not rate:
                rate = typical = typical or self.typical_rate(*_peers(worker))
            num_queued = num_mine(incarnation, 0)
            if is_prefill and figures.num_tokens_in_flight > num_queued:
                num_queued = self._num_left(worker, rate, num_queued)
            queue_ms = 1000.0 * num_queued / rate
            if caches is not None:
                cached, num_missing, load_ms = caches.of(incarnation, figures, rate)
            compute_ms = 1000.0 * num_missing / rate
            estimates.append(PrefillEstimate(worker, cached, num_missing, queue_ms, load_ms, compute_ms))
        return estimates

    def prefix_wait_ms(self, estimate: PrefillEstimate) -> float:
        """Return how long a worker may wait for what another host's store has: some times as long as predicted.

        Not longer than computing it takes, so a KV service that hangs costs a prompt as much time again, at most.
        """
        computed_ms = 1000.0 * estimate.cached.remote / self.tokens_per_second(estimate.worker)
        return min(computed_ms, _LATE_LOADS * estimate.load_ms)

    def local_ms(self, estimate: PrefillEstimate) -> float:
        """Return the cost of a prompt at a decode worker, the delay of the answers that run there included."""
        return self.all_local_ms([estimate])[0]

    def all_local_ms(self, estimates: Sequence[PrefillEstimate]) -> list[float]:
        """Return the same as `local_ms` for several decode workers."""
        found = []
        for estimate in estimates:
            num_answers = max(1, self.num_answers(estimate.worker))
            prompt_ms = (estimate.load_ms + estimate.compute_ms) * (1 + SHARE_OF_OTHERS * num_answers)
            found.append(estimate.queue_ms + prompt_ms)
        return found

    def num_answers(self, worker: Worker) -> int:
        """Return the answers at a worker: this gateway's as of now, and the others' as of the worker's last report.

        An answer of this gateway that has ended since that report is not counted any more.
        """
        of_others = self._answers_of_others.get(worker.incarnation, worker.figures.num_running)
        return of_others + self._in_flight.answers.get(worker.incarnation, 0)

    def shown(self, estimate: PrefillEstimate, num_tokens: int) -> Shown:
        """Return what others can read of a prompt of so many tokens at a prefill worker, and when."""
        computed, compute_ms = estimate.num_computed_tokens, estimate.compute_ms
        return shown(estimate.worker.figures, num_tokens, computed, compute_ms, estimate.total_ms)

    def hand_over(self, estimate: PrefillEstimate, num_tokens: int, decode: Worker, num_own: int = 0) -> HandOverCost:
        """Return what handing a prompt over takes after prefill's first token; decode has `num_own` of its tokens."""
        from_host = estimate.worker.figures.host_id
        return self.hand_overs.cost(self.shown(estimate, num_tokens), from_host, decode, num_own)

    def num_queued(self, worker: Worker) -> int:
        """Return the prompt tokens that wait at a worker. A decode worker's own report counts its answers instead.

        A prefill worker has gone on computing since its report: a report of a second ago says busy of one that idles.
        """
        num_mine = self._in_flight.prefill_tokens.get(worker.incarnation, 0)
        if worker.role != _PREFILL:
            return num_mine
        return self._num_left(worker, self.tokens_per_second(worker), num_mine)

    def _num_left(self, worker: Worker, rate: float, num_mine: int) -> int:
        """Return the tokens that wait at a prefill worker, to which this gateway has sent `num_mine`."""
        num_reported = worker.figures.num_tokens_in_flight
        if num_reported <= num_mine:
            return num_mine
        num_computed_since = round((self._clock() - worker.last_heartbeat) * rate)
        return max(num_mine, num_reported - max(0, num_computed_since))

    def tokens_per_second(self, worker: Worker) -> float:
        """Return a worker's prefill rate; the mean of its peers before its first prompt."""
        return self.measured_rate(worker) or self.typical_rate(*_peers(worker))

    def answer_tokens_per_second(self, worker: Worker) -> float:
        """Return the tokens that a decode worker samples per second of its steps; the mean of its peers before that."""
        own = worker.figures.answer_rate
        return self.typical_answer_rate(worker.figures.model_id, worker.role) if own is None else own

    def typical_answer_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float:
        """Return the recent mean of the tokens that a model's workers of a role sample per second of their steps."""
        key = "answers", model_id, role
        recent = self._recent(key)
        if recent is not None:
            return recent
        known = self._means.answer_rate(model_id, role)
        return self._noted(key, known) if known else 1000.0 / ASSUMED_STEP_MS

    def typical_rate(self, model_id: str, numerics_class: str, role: pb.WorkerRole.ValueType) -> float:
        """Return the rate of a model's workers of that class and role, else of that role, else of its prefill workers.

        Of decode workers as of this moment: a mean of half a second ago may be of first prompts, which are slow, and a
        worker that has had none would be passed over.
        """
        computed = self._computed_by_peers.get((model_id, numerics_class, role)) if role != _PREFILL else None
        if computed is not None and computed.num_tokens:
            return computed.num_tokens / computed.seconds
        key = "prompts", model_id, role
        recent = self._recent(key)
        if recent is not None:
            return recent
        of_role = self._means.prompt_rate(model_id, role) or self._means.prompt_rate(model_id, _PREFILL)
        return self._noted(key, of_role) if of_role else _ASSUMED_TOKENS_PER_SECOND

    def _recent(self, key: _Mean) -> float | None:
        """Return a mean over all workers if it was noted half a second ago at most."""
        noted = self._typical_rates.get(key)
        return noted[0] if noted is not None and self._clock() < noted[1] else None

    def _noted(self, key: _Mean, rate: float) -> float:
        self._typical_rates[key] = rate, self._clock() + _TYPICAL_SECONDS
        return rate

    def measured_rate(self, worker: Worker) -> float | None:
        """Return a worker's rate of prompts. Prefill workers report theirs: their steps compute nothing else."""
        if worker.role == _PREFILL:
            return self._prefill_rates.of(worker.incarnation)
        return self.computed_rate(worker)

    def computed_rate(self, worker: Worker) -> float | None:
        """Return the rate of the prompts that a decode worker computed lately, drawn towards that of its peers."""
        own = self._computed.get(worker.incarnation)
        if own is None:
            return None
        seconds_of_peers = self.seconds_of_peers(*_peers(worker))
        if seconds_of_peers is None:  # its card has changed since
            seconds_of_peers = _seconds_of_tokens(own)
        if not seconds_of_peers:
            return None
        return (own.num_tokens + _TOKENS_OF_PEERS) / (own.seconds + seconds_of_peers)

    def seconds_of_peers(self, model_id: str, numerics_class: str, role: pb.WorkerRole.ValueType) -> float | None:
        """Return what `_TOKENS_OF_PEERS` prompt tokens take these decode workers; 0: not known; None: they are new."""
        of_peers = self._computed_by_peers.get((model_id, numerics_class, role))
        return None if of_peers is None else _seconds_of_tokens(of_peers)

    def computed_lately(self, worker: Worker) -> tuple[float, float]:
        """Return the prompt tokens that a decode worker computed lately, and the seconds of that; (-1, 0): none yet."""
        own = self._computed.get(worker.incarnation)
        return (-1.0, 0.0) if own is None else own[:2]

    # ------------------------------------------------------------------------------------------------- learning

    def prompt_read(self, worker: Worker, ledger: pb.PhaseLedger, most_seconds: float = math.inf) -> None:
        """Take in the ledger of a phase that has computed a prompt, or the rest of one.

        The first of a worker is left out if its peers have had some: what is loaded at its first use makes it slow.
        `most_seconds`: the gateway's own measure of more than that; the worker's clock may be set meanwhile.
        """
        seconds, num_tokens = (ledger.first_token_ns - ledger.scheduled_ns) / 1e9, ledger.num_computed_tokens
        seconds = min(seconds, most_seconds)
        if seconds > 0 and num_tokens and ledger.scheduled_ns:
            incarnation, peers, now = worker.incarnation, _peers(worker), self._clock()
            own, of_peers = self._computed.get(incarnation), self._computed_by_peers.get(peers)
            if own is None:
                self._computed[incarnation] = _Computed(0.0, 0.0, now)
            else:
                self._computed[incarnation] = _summed(own, _OLD_WEIGHT, num_tokens, seconds, now)
            if own is not None or of_peers is None:
                self._computed_by_peers[peers] = _summed(of_peers, _OLD_WEIGHT_OF_PEERS, num_tokens, seconds, now)
            self._rate_changed(incarnation)

    def handed_over(
        self, writer: Worker, prefill: pb.PhaseLedger, reader: Worker, num_bytes: int, took_ms: float
    ) -> None:
        """Take in a hand-over that has ended, of so many bytes.

        `took_ms`: from prefill's first token. A decode worker without room refuses, and takes a later Submit: the wait
        until then is not the hand-over's.
        """
        compute_ms = (prefill.first_token_ns - prefill.scheduled_ns) / 1e6 if prefill.scheduled_ns else 0.0
        first_ms = (prefill.first_token_ns - prefill.submitted_ns) / 1e6 if prefill.submitted_ns else math.inf
        computed = prefill.num_computed_tokens
        what = shown(writer.figures, prefill.num_prompt_tokens, computed, max(0.0, compute_ms), max(0.0, first_ms))
        self.hand_overs.ended(what, writer.figures.host_id, reader, num_bytes, took_ms)

    def _heard(self, worker: Worker) -> None:
        """Take a worker that has computed no prompt for long for one of its peers: it may have been slow for once."""
        self._count_answers_of_others(worker)
        computed = self._computed.get(worker.incarnation)
        if computed is not None and computed.num_tokens and self._clock() - computed.at > _FORGET_SECONDS:
            self._computed[worker.incarnation] = _Computed(0.0, 0.0, computed.at)
            self._rate_changed(worker.incarnation)

    def _rate_changed(self, incarnation: str) -> None:
        for listener in self._listeners:
            listener(incarnation)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if is_here:
            self._count_answers_of_others(worker)
            return
        self._computed.pop(worker.incarnation, None)
        self._answers_of_others.pop(worker.incarnation, None)

    def _count_answers_of_others(self, worker: Worker) -> None:
        num_mine = self._in_flight.answers.get(worker.incarnation, 0)
        self._answers_of_others[worker.incarnation] = max(0, worker.figures.num_running - num_mine)


def _subtract(counter: Counter[str], incarnation: str, number: int) -> None:
    counter[incarnation] -= number
    if counter[incarnation] <= 0:
        del counter[incarnation]


def _seconds_of_tokens(computed: _Computed) -> float:
    return _TOKENS_OF_PEERS * computed.seconds / computed.num_tokens if computed.num_tokens else 0.0


def _peers(worker: Worker) -> _Peers:
    return worker.figures.model_id, worker.figures.numerics_class, worker.role


def _summed(old: _Computed | None, weight: float, num_tokens: int, seconds: float, now: float) -> _Computed:
    """Return what was computed lately, the old with less weight."""
    if old is None:
        return _Computed(num_tokens, seconds, now)
    return _Computed(weight * old.num_tokens + num_tokens, weight * old.seconds + seconds, now)
