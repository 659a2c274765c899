"""Predicts how long each worker needs for a prompt, from measured speeds and the prefix index.

Speeds are measured on earlier requests. The assumptions below hold until the first request has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_figures import Link
from control_plane.routing.prefix_index import CachedPrefix, PrefixMatch
from control_plane.routing.sample_points import SamplePointIndex
from tandem.v1 import types_pb2 as pb

HandOver = Literal["if_cheaper", "always", "never"]

ASSUMED_STEP_MS = 50.0
EXPECTED_ANSWER_TOKENS = 256
"""Steps of an answer for which the load of its decode worker counts; the answer may be longer."""
_ASSUMED_TOKENS_PER_SECOND = 1000.0
_ASSUMED_HAND_OVER_MS = 8.0
_ASSUMED_LINK = Link(latency_ms=2.0, bytes_per_second=1e9)
"""Of another host's store: before its first byte, and then."""
_MEMORY_BYTES_PER_SECOND = 5e9
"""From the host's store into a pool: one copy, beside other work."""
_OLD_WEIGHT = 0.8
"""Weight of earlier measurements in a moving average."""
_TYPICAL_SECONDS = 0.5
"""How long a mean over all workers is cached: workers report each second, and every request needs the mean."""
_MAX_HAND_OVER_MS = 10_000.0
"""A longer hand-over is a difference between two hosts' clocks."""
SHARE_OF_OTHERS = 0.5
"""A running answer that waits for another request's prompt costs half as much as that prompt.

At least one answer is counted: an idle decode worker may get an answer at any moment, and stays free for it if prefill
computes the prompt.
"""


NOTHING_CACHED = CachedPrefix()


@dataclass(frozen=True)
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


class PrefillEstimate(NamedTuple):
    """The predicted cost of computing or loading one prompt's KV cache at one worker."""

    worker: Worker
    cached: CachedPrefix
    """Tokens, as the index has them; the times below include how often the index was right lately."""
    source: str
    """Address of the KV service that remote tokens come from."""
    num_computed_tokens: int
    queue_ms: float
    load_ms: float
    compute_ms: float
    source_id: str = ""
    """The worker id of that KV service."""

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
        self._hand_over_ms = _ASSUMED_HAND_OVER_MS
        """From prefill's first token until decode has every block."""
        self._typical_rates: dict[tuple[str, str, pb.WorkerRole.ValueType], tuple[float, float]] = {}
        self._computed: dict[str, tuple[float, float]] = {}
        """Tokens and seconds of the prompts that each decode worker computed."""
        self._store_hit_rates: dict[str, float] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._means: Means
        registry.listen(self._changed)

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
        match = self._prefixes.find(request.block_hashes[:num_useful], space)
        if not match.hosts:
            return match
        return replace(match, hosts={host: num for host, num in match.hosts.items() if self._registry.store_of(host)})

    def estimate(self, worker: Worker, request: RoutingRequest, match: PrefixMatch) -> PrefillEstimate:
        """Predict when a worker would have the whole prompt, after the prompts that wait there already."""
        return self.estimates([worker], request, match)[0]

    def estimates(
        self, workers: Sequence[Worker], request: RoutingRequest, match: PrefixMatch
    ) -> list[PrefillEstimate]:
        """Return the same for several workers."""
        num_tokens, estimates = max(1, request.num_prompt_tokens), []
        sources = _Sources(self._registry, match) if match.pools or match.hosts else None
        for worker in workers:
            rate = self.tokens_per_second(worker)
            cached, source, num_missing, load_ms = NOTHING_CACHED, None, num_tokens, 0.0
            if sources is not None:
                cached, source, num_missing, load_ms = self._cached(worker, rate, request, match, sources)
            address, source_id = ("", "") if source is None else (source.info.address, source.worker_id)
            queue_ms, compute_ms = 1000.0 * self._num_queued(worker, rate) / rate, 1000.0 * num_missing / rate
            estimates.append(
                PrefillEstimate(worker, cached, address, num_missing, queue_ms, load_ms, compute_ms, source_id)
            )
        return estimates

    def _cached(
        self, worker: Worker, rate: float, request: RoutingRequest, match: PrefixMatch, sources: _Sources
    ) -> tuple[CachedPrefix, Worker | None, int, float]:
        """Return what is cached for a worker, whence it comes, the tokens left to compute, and the ms of loading."""
        figures, size = worker.figures, request.grain
        own, host, remote, remote_host = match.seen_from(worker.incarnation, figures.host_id)
        if not (own or host or remote):
            return NOTHING_CACHED, None, max(1, request.num_prompt_tokens), 0.0
        bytes_per_grain = figures.bytes_per_block * size / (figures.tokens_per_block or size)
        source, fetch_ms = None, 0.0
        if remote:
            source, fetch_ms = sources.fetch(figures.host_id, remote * bytes_per_grain)
            if source is None or fetch_ms >= 1000.0 * remote * size / rate:  # computing them is sooner
                source, fetch_ms, remote, remote_host = None, 0.0, 0, ""
        num_found = size * host * self._store_hit_rates.get(figures.host_id, 1.0) if host else 0.0
        num_missing = max(1, round(request.num_prompt_tokens - size * (own + remote) - num_found))
        load_ms = 1000.0 * num_found / size * bytes_per_grain / _MEMORY_BYTES_PER_SECOND + fetch_ms
        return CachedPrefix(size * own, size * host, size * remote, remote_host), source, num_missing, load_ms

    def local_ms(self, estimate: PrefillEstimate) -> float:
        """Return the cost of a prompt at a decode worker, the delay of the answers that run there included."""
        worker = estimate.worker
        num_running = max(1, worker.figures.num_running, self._in_flight.answers[worker.incarnation])
        own_ms = estimate.load_ms + estimate.compute_ms
        return estimate.queue_ms + own_ms * (1 + SHARE_OF_OTHERS * num_running)

    def hand_over_ms(self, estimate: PrefillEstimate) -> float:
        """Return the cost of a prompt at a prefill worker, the hand-over included."""
        return estimate.total_ms + self._hand_over_ms

    def num_queued(self, worker: Worker) -> int:
        """Return the prompt tokens that wait at a worker. A decode worker's own report counts its answers instead.

        A prefill worker has gone on computing since its report: a report of a second ago says busy of one that idles.
        """
        return self._num_queued(worker, self.tokens_per_second(worker))

    def _num_queued(self, worker: Worker, rate: float) -> int:
        num_mine, num_reported = self._in_flight.prefill_tokens[worker.incarnation], worker.figures.num_tokens_in_flight
        if worker.role != pb.WORKER_ROLE_PREFILL or num_reported <= num_mine:
            return num_mine
        num_computed_since = round((self._clock() - worker.last_heartbeat) * rate)
        return max(num_mine, num_reported - max(0, num_computed_since))

    def tokens_per_second(self, worker: Worker) -> float:
        """Return a worker's prefill rate; the mean of its peers before its first prompt."""
        return self.measured_rate(worker) or self.typical_rate(worker.figures.model_id, worker.role)

    def answer_tokens_per_second(self, worker: Worker) -> float:
        """Return the tokens that a decode worker samples per second of its steps; the mean of its peers before that."""
        own = worker.figures.answer_rate
        return self.typical_answer_rate(worker.figures.model_id, worker.role) if own is None else own

    def typical_answer_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float:
        """Return the recent mean of the tokens that a model's workers of a role sample per second of their steps."""
        return self._recent(
            "answers", model_id, role, lambda: self._means.answer_rate(model_id, role) or 1000.0 / ASSUMED_STEP_MS
        )

    def typical_rate(self, model_id: str, role: pb.WorkerRole.ValueType) -> float:
        """Return the recent mean rate of a model's workers of that role, else of its prefill workers."""

        def mean() -> float:
            of_role = self._means.prompt_rate(model_id, role)
            return of_role or self._means.prompt_rate(model_id, pb.WORKER_ROLE_PREFILL) or _ASSUMED_TOKENS_PER_SECOND

        return self._recent("prompts", model_id, role, mean)

    def _recent(self, what: str, model_id: str, role: pb.WorkerRole.ValueType, mean: Callable[[], float]) -> float:
        """Return a mean over all workers of half a second ago at most."""
        rate, until = self._typical_rates.get((what, model_id, role), (0.0, 0.0))
        now = self._clock()
        if now >= until:
            rate = mean()
            self._typical_rates[what, model_id, role] = rate, now + _TYPICAL_SECONDS
        return rate

    def measured_rate(self, worker: Worker) -> float | None:
        """Prefill workers report their rate themselves: their steps only compute prompts."""
        if worker.role == pb.WORKER_ROLE_PREFILL:
            return worker.figures.prompt_rate
        return self.computed_rate(worker.incarnation)

    def computed_rate(self, incarnation: str) -> float | None:
        """Return the rate of the prompts that a decode worker computed lately."""
        computed = self._computed.get(incarnation)
        return None if computed is None else computed[0] / computed[1]

    # ------------------------------------------------------------------------------------------------- learning

    def prompt_read(self, incarnation: str, ledger: pb.PhaseLedger) -> None:
        """Take in the ledger of a phase that has computed a prompt, or the rest of one."""
        seconds = (ledger.first_token_ns - ledger.scheduled_ns) / 1e9
        if seconds > 0 and ledger.num_computed_tokens and ledger.scheduled_ns:
            num_tokens, num_seconds = self._computed.get(incarnation, (0.0, 0.0))
            self._computed[incarnation] = (
                _OLD_WEIGHT * num_tokens + ledger.num_computed_tokens,
                _OLD_WEIGHT * num_seconds + seconds,
            )
            for listener in self._listeners:
                listener(incarnation)

    def handed_over(self, prefill: pb.PhaseLedger, decode: pb.PhaseLedger) -> None:
        """Take in the ledgers of both halves of a request.

        A decode worker without room refuses, and takes a later Submit: the wait until then is not the hand-over's.
        """
        if prefill.first_token_ns and decode.transfer_end_ns:
            begun_ns = max(prefill.first_token_ns, decode.submitted_ns)
            took_ms = min(_MAX_HAND_OVER_MS, max(0.0, (decode.transfer_end_ns - begun_ns) / 1e6))
            self._hand_over_ms = _mixed(self._hand_over_ms, took_ms)

    def store_used(self, host_id: str, num_expected_tokens: int, num_found: int) -> None:
        """Record how many of the tokens expected in a host's store were there."""
        if num_expected_tokens > 0:
            share = min(1.0, max(0.0, num_found / num_expected_tokens))
            self._store_hit_rates[host_id] = _mixed(self._store_hit_rates.get(host_id, 1.0), share)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if not is_here:
            self._computed.pop(worker.incarnation, None)
            if not any(other.info.host_id == worker.info.host_id for other in self._registry.workers()):
                self._store_hit_rates.pop(worker.info.host_id, None)


class _Sources:
    """The host whose store has the most of a prompt, and what fetching from there takes."""

    def __init__(self, registry: WorkerRegistry, match: PrefixMatch) -> None:
        self._registry = registry
        host_id, num_blocks = match.deepest_host
        self._source = registry.store_of(host_id) if num_blocks else None
        self._links: dict[str, Link | None] = {}

    def fetch(self, host_id: str, num_bytes: float) -> tuple[Worker | None, float]:
        """Return the store and the milliseconds that a host's store would need, by what that has measured.

        None: one of the hosts has no store.
        """
        if host_id not in self._links:
            store = self._registry.store_of(host_id) if self._source is not None else None
            self._links[host_id] = None if store is None or self._source is None else _link(store, self._source)
        link = self._links[host_id]
        if link is None:
            return None, 0.0
        return self._source, link.latency_ms + 1000.0 * num_bytes / link.bytes_per_second


def _link(store: Worker, source: Worker) -> Link:
    return store.figures.links.get(source.info.address, _ASSUMED_LINK)


def _subtract(counter: Counter[str], incarnation: str, number: int) -> None:
    counter[incarnation] -= number
    if counter[incarnation] <= 0:
        del counter[incarnation]


def _mixed(old: float, new: float) -> float:
    return _OLD_WEIGHT * old + (1 - _OLD_WEIGHT) * new
