"""Runs a trace through a simulated fleet, in virtual time, with a policy in place of each gateway's router.

With rules of admission each gateway lets requests wait, orders and refuses them as a real one does; else nobody is
refused, and who came first is served first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from control_plane.simulator.admission_line import AdmissionLine, AdmissionRules
from control_plane.simulator.engine import Engine, Job
from control_plane.simulator.lines import Attempt, FirstCome, Line, Reason
from control_plane.simulator.links import Links
from control_plane.simulator.outcome import Answered, Refused
from control_plane.simulator.policies.policy import AdmittingPolicy, Placement, Policy
from control_plane.simulator.pool import Store
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.traces import TraceRequest

_TELL_SECONDS = 1.0
"""How often workers tell a gateway what accounts have used at the others."""


class TooLong(ValueError):
    """No worker's pool could ever hold a request."""


@dataclass(eq=False)
class _Live:
    """A request that has arrived and not ended."""

    request: TraceRequest
    arrived_at: float
    gateway: int
    placement: Placement | None = None
    decode: int = 0
    prefill_job: Job | None = None
    decode_job: Job | None = None
    first_token_at: float | None = None
    decode_began_at: float | None = None
    num_attempts: int = 0
    started_at: float = 0.0


class _Gateway:
    """A policy, and those that wait. Is the `Hall` of its line."""

    def __init__(self, simulation: Simulation, policy: Policy, rules: AdmissionRules | None) -> None:
        self._simulation = simulation
        self.policy = policy
        self.line: Line = FirstCome(self) if rules is None else AdmissionLine(self, _admitting(policy), rules)

    def place(self, request: TraceRequest, now: float) -> Attempt:
        return self._simulation.place(request.number, now)

    def at(self, moment: float, happen: Callable[[float], object]) -> None:
        self._simulation.at(moment, happen)

    def refuse(self, request: TraceRequest, reason: Reason, now: float) -> None:
        self._simulation.refuse(request.number, reason, now)

    def generated(self, number: int, now: float) -> float:
        return self._simulation.generated(number, now)


class Simulation:
    """One run. `run` returns an `Answered` for each request that was not refused, in the trace's order."""

    def __init__(
        self,
        fleet: FleetProfile,
        policies: Sequence[Policy],
        trace: Sequence[TraceRequest],
        admission: AdmissionRules | None = None,
        gateway_of: Callable[[TraceRequest], int] | None = None,
    ) -> None:
        """`policies`: one for each gateway, with `admission` AdmittingPolicies.

        `gateway_of`: the place of a request's gateway; None: they go to the gateways in turn, those of a session to
        one. Raises TooLong if no decode worker could hold one of the requests alone, ValueError for blocks of two
        sizes and for a model without a worker.
        """
        self._fleet = fleet
        self._trace = trace
        _check(fleet, trace)
        block_tokens = trace[0].block_tokens if trace else 1
        self._stores = (
            [Store(fleet.store_tokens, block_tokens) for _ in range(fleet.num_hosts)] if fleet.store_tokens else []
        )
        self.engines = [self._engine(number, block_tokens) for number in range(fleet.num_workers)]
        self._gateway_of = gateway_of or (lambda request: _in_turn(request) % len(policies))
        self._gateways = [_Gateway(self, policy, admission) for policy in policies]
        self._links = Links(fleet)
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._order = itertools.count()
        self._predicted: list[int] = [-1] * fleet.num_workers
        self._lives: dict[int, _Live] = {}
        """By request, while it is here."""
        self._live_jobs: dict[int, _Live] = {}
        self._followers: dict[int, list[TraceRequest]] = {}
        self._answered: dict[int, Answered] = {}
        self._refused: dict[int, tuple[_Live, Reason, float]] = {}
        self.now = 0.0

    def _engine(self, number: int, block_tokens: int) -> Engine:
        fleet = self._fleet
        profile = fleet.profile_of(number)
        store = self._stores[fleet.host_of(number)] if self._stores else None
        return Engine(number, profile, fleet, block_tokens, store, self._prompt_computed, self._answer_complete)

    # ---------------------------------------------------------------------------------------------------- the clock

    def run(self) -> list[Answered]:
        """Run until every request has ended or was refused."""
        for request in self._trace:
            if request.after is None:
                self._arrives_at(request, request.arrival)
            else:
                self._followers.setdefault(request.after, []).append(request)
        if len(self._gateways) > 1:
            self.at(_TELL_SECONDS, self._tell_use)
        for place, gateway in enumerate(self._gateways):
            self._schedule_reports(place, gateway.policy.report_seconds or self._fleet.report_seconds)
        while len(self._answered) + len(self._refused) < len(self._trace):
            self.now, _, happen = heapq.heappop(self._events)
            happen(self.now)
        return [self._answered[request.number] for request in self._trace if request.number in self._answered]

    @property
    def refused(self) -> list[Refused]:
        """Return the requests that were refused, in the trace's order; after `run`."""
        return [self._refusal(*self._refused[number]) for number in sorted(self._refused)]

    def _refusal(self, live: _Live, reason: Reason, now: float) -> Refused:
        line = self._gateways[live.gateway].line
        shadow = line.shadows.get(live.request.number) if isinstance(line, AdmissionLine) else None
        instead = None if shadow is None or shadow.number is None else self._answered[shadow.number]
        ttft = tpot = None
        if shadow is not None and instead is not None:
            profile = self._fleet.prefill if self._fleet.num_prefill else self._fleet.decode
            of_both = (profile.prompt_seconds(num, 0) for num in (live.request.num_prompt_tokens, instead.num_missing))
            own_seconds, their_seconds = of_both
            served = instead.first_token_at - instead.started_at + max(0.0, own_seconds - their_seconds)
            ttft, tpot = shadow.at - live.arrived_at + served, instead.tpot_seconds
        return Refused(live.request, live.arrived_at, now, live.gateway, reason, ttft, tpot)

    def _tell_use(self, now: float) -> None:
        """Let workers tell each gateway what accounts have used at the others."""
        lines = [gateway.line for gateway in self._gateways if isinstance(gateway.line, AdmissionLine)]
        taken = [line.take_use() for line in lines]
        for place, line in enumerate(lines):
            for other, used in enumerate(taken):
                if other != place:
                    line.used_elsewhere(used)
        self.at(now + _TELL_SECONDS, self._tell_use)

    def at(self, moment: float, happen: Callable[[float], object]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), happen))

    def _arrives_at(self, request: TraceRequest, moment: float) -> None:
        self.at(moment, lambda now: self._arrived(request, now))

    def _schedule_reports(self, gateway: int, seconds: float) -> None:
        """Let each worker report at a phase of its own."""
        policy, num_workers = self._gateways[gateway].policy, len(self.engines)
        line = self._gateways[gateway].line

        def send(number: int, now: float) -> None:
            policy.report(self.engines[number].report(now), now)
            line.reported(number, now)
            self.at(now + seconds, lambda then: send(number, then))

        for number in range(num_workers):
            phase = seconds * ((number * 0.6180339887) % 1.0)
            policy.report(self.engines[number].report(0.0), 0.0)
            self.at(phase, lambda now, number=number: send(number, now))  # type: ignore[misc]

    def _watch(self, number: int) -> None:
        """Predict the next change of an engine, and of those that share its core, unless the prediction stands."""
        engine = self.engines[number]
        if not self._fleet.cores:
            self._predict(engine)
            return
        core = self._fleet.cores[number]
        sharing = [each for each in self.engines if self._fleet.cores[each.number] == core]
        num_busy = sum(each.is_busy for each in sharing)
        for each in sharing:
            each.set_speed(1 / max(1, num_busy), self.now)
            self._predict(each)

    def _predict(self, engine: Engine) -> None:
        if self._predicted[engine.number] == engine.version:
            return
        version = self._predicted[engine.number] = engine.version
        moment = engine.next_change()
        if moment is not None:
            self.at(moment, lambda now: self._change(engine, version, now))

    def _change(self, engine: Engine, version: int, now: float) -> None:
        if engine.version == version:
            engine.change(now)
            self._watch(engine.number)

    # ------------------------------------------------------------------------------------------- a request's life

    def _arrived(self, request: TraceRequest, now: float) -> None:
        live = self._lives[request.number] = _Live(request, now, self._gateway_of(request))
        line = self._gateways[live.gateway].line
        self.at(now + self._fleet.gateway_seconds, lambda then: line.arrived(request, then))

    def place(self, number: int, now: float) -> Attempt:
        """Place a request, and submit it."""
        live = self._lives[number]
        policy = self._gateways[live.gateway].policy
        live.num_attempts += 1
        placement = policy.place(live.request, now)
        if placement is None:
            return Attempt(None)
        refused_by = self._submit(live, placement, now)
        if live.decode_job is None:
            return Attempt(None, refused_by=tuple(refused_by))
        live.started_at = now
        policy.accepted(live.request, placement, live.decode)
        return Attempt(placement, live.decode, tuple(refused_by))

    def refuse(self, number: int, reason: Reason, now: float) -> None:
        """A request is not served. What follows it comes all the same: its client has lost an answer, no more."""
        live = self._lives.pop(number)
        self._refused[number] = live, reason, now
        self._follow(live.request, now)

    def generated(self, number: int, now: float) -> float:
        """Return how many tokens of a running request's answer there are."""
        live = self._lives[number]
        return 0.0 if live.decode_job is None else self.engines[live.decode].num_generated(live.decode_job, now)

    def _follow(self, request: TraceRequest, now: float) -> None:
        for follower in self._followers.pop(request.number, ()):
            seconds = self._fleet.return_seconds + follower.gap_seconds
            self._arrives_at(follower, max(follower.arrival, now + seconds))

    def _submit(self, live: _Live, placement: Placement, now: float) -> list[int]:
        """Submit to the first decode worker that accepts, and to prefill; return the workers that refused.

        Nothing is left behind if one half has no worker.
        """
        is_local, refused_by = placement.prefill is None, []
        for number in placement.decodes:
            job = Job(live.request, computes_prompt=is_local, decodes=True)
            if is_local:
                self._add_source(job, placement, number)
            submit = self.engines[number].submit_prompt if is_local else self.engines[number].reserve
            if submit(job, now):
                break
            refused_by.append(number)
        else:
            return refused_by
        if placement.prefill is not None:
            prefill = Job(live.request, computes_prompt=True, decodes=False)
            self._add_source(prefill, placement, placement.prefill)
            if not self.engines[placement.prefill].submit_prompt(prefill, now):
                self.engines[number].cancel(job, now)
                self._watch(number)
                return [*refused_by, placement.prefill]
            live.prefill_job = prefill
            self._live_jobs[id(prefill)] = live
            self._watch(placement.prefill)
        live.placement, live.decode, live.decode_job = placement, number, job
        self._live_jobs[id(job)] = live
        self._watch(number)
        return refused_by

    def _add_source(self, job: Job, placement: Placement, number: int) -> None:
        if placement.source_host is not None and placement.source_host != self._fleet.host_of(number) and self._stores:
            job.source = self._stores[placement.source_host]
            job.source_bytes_per_second = self._fleet.link_bytes_per_second

    def _prompt_computed(self, engine: Engine, job: Job, now: float) -> None:
        """The first token is there, at prefill or at decode."""
        live = self._live_jobs[id(job)]
        live.first_token_at = now
        gateway = self._gateways[live.gateway]
        gateway.policy.prompt_read(live.request, engine.number, job, was_pulled=False)
        gateway.line.prompt_read(live.request, now)
        if job.decodes:
            return
        del self._live_jobs[id(job)]
        assert live.decode_job is not None, "a prompt is handed over to a decode worker"
        moment = self._links.arrives_at(engine.number, job, live.decode, live.decode_job, now)
        self.at(moment, lambda then: self._decode_begins(live, then))

    def _decode_begins(self, live: _Live, now: float) -> None:
        assert live.decode_job is not None
        live.decode_began_at = now
        self._gateways[live.gateway].policy.prompt_read(live.request, live.decode, live.decode_job, was_pulled=True)
        self.engines[live.decode].begin(live.decode_job, now)
        self._watch(live.decode)

    def _answer_complete(self, engine: Engine, job: Job, now: float) -> None:
        """The last token is there. Decode gave it, so the whole request has ended."""
        if not job.decodes:
            return
        live, fleet = self._live_jobs.pop(id(job)), self._fleet
        request, placement, first_at = live.request, live.placement, live.first_token_at
        assert placement is not None and first_at is not None
        computed = live.prefill_job or job
        gap = None if live.decode_began_at is None else live.decode_began_at - first_at
        self._answered[request.number] = Answered(
            request,
            live.arrived_at,
            first_at + fleet.return_seconds,
            now + fleet.return_seconds,
            placement.prefill,
            live.decode,
            computed.num_cached,
            placement.predicted_cached,
            gap,
            job.num_preemptions,
            live.num_attempts,
            live.started_at,
        )
        del self._lives[request.number]
        gateway = self._gateways[live.gateway]
        gateway.policy.ended(request, live.decode, gap)
        self._follow(request, now)
        gateway.line.ended(request, computed, now)


def _admitting(policy: Policy) -> AdmittingPolicy:
    if not isinstance(policy, AdmittingPolicy):
        raise ValueError(f"{type(policy).__name__} knows no room of workers, so it admits nobody")
    return policy


def _in_turn(request: TraceRequest) -> int:
    """Return a number that is the same for all requests of a session, and else the request's own."""
    return _hash_of(request.session) if request.session else request.number


def _hash_of(session: str) -> int:
    """Return a number of a session, the same in every run."""
    return sum(byte * 31**place for place, byte in enumerate(session.encode()[:16]))


def _check(fleet: FleetProfile, trace: Sequence[TraceRequest]) -> None:
    if len({request.block_tokens for request in trace}) > 1:
        raise ValueError("the trace has blocks of several sizes; one size is wanted")
    decode_models = {fleet.model_of(number) for number in range(fleet.num_prefill, fleet.num_workers)}
    for place, request in enumerate(trace):
        if fleet.models and request.model not in decode_models:
            raise ValueError(f"request {place} of the trace is for {request.model!r}, which no decode worker has")
        if request.number != place:
            raise ValueError(f"request {request.number} is at place {place} of the trace")
        needed = request.num_prompt_tokens + request.num_output_tokens + 1
        most = min(fleet.decode.kv_tokens, fleet.prefill.kv_tokens) if fleet.num_prefill else fleet.decode.kv_tokens
        if needed > most:
            raise TooLong(f"request {place} of the trace needs {needed:,} KV tokens, a worker's pool has {most:,}")
