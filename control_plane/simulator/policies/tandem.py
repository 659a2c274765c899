"""Tandem's own router as a policy: `Router.choose` with a registry that simulated load reports keep up to date.

What the gateway's dispatcher tells the router of a real request, this tells it of a simulated one: tokens in flight,
ledgers, where blocks are.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from control_plane.block_chain import BlockHashes
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.cost_model import HandOver, InFlightEntry, RoutingRequest
from control_plane.routing.groups import index_space
from control_plane.routing.router import Route, Router
from control_plane.routing.session_affinity import SessionRoute
from control_plane.simulator.engine import Job, Report
from control_plane.simulator.policies.policy import Placement
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES
from tandem_runtime.errors import Overloaded

_MODEL = "simulated"
GRAIN = 16
_CONTEXT_LENGTH = 1 << 20


@dataclass(eq=False)
class Flight:
    """What the router counts of a request while it runs."""

    route: Route
    hashes: BlockHashes
    prefill: InFlightEntry | None = None
    decode: InFlightEntry | None = None
    prefill_ledger: pb.PhaseLedger | None = None


class TandemPolicy:
    """One gateway."""

    report_seconds: float | None = None

    def __init__(
        self,
        fleet: FleetProfile,
        seed: int,
        hand_over: HandOver = "if_cheaper",
    ) -> None:
        """`hand_over`: whether prefill workers compute prompts; always and never are there to be compared with."""
        self.fleet = fleet
        self._hand_over = hand_over
        self._now = 0.0
        clock = lambda: self._now  # noqa: E731
        self._registry = WorkerRegistry(1e9, 2e9, clock, grain=GRAIN)
        self._register()
        health = WorkerHealth(self._registry, clock)
        self.router = Router(self._registry, rng=random.Random(seed), health=health, clock=clock)
        self._flights: dict[int, Flight] = {}

    # ------------------------------------------------------------------------------------------------- the registry

    def _register(self) -> None:
        fleet = self.fleet
        for host in range(fleet.num_hosts):
            info = pb.WorkerInfo(
                worker_id=_kv_id(host),
                incarnation=_kv_id(host),
                role=pb.WORKER_ROLE_KV,
                address=_kv_address(host),
                host_id=_host_id(host),
            )
            load = pb.LoadReport(state=pb.WORKER_STATE_READY)
            if fleet.store_tokens:
                load.kv_service.store.total_bytes = fleet.store_tokens * fleet.prefill.bytes_per_token
            for other in range(fleet.num_hosts):
                if other != host:
                    load.kv_service.links.add(
                        address=_kv_address(other),
                        bytes_per_second=fleet.link_bytes_per_second,
                        latency_ms=1000 * fleet.link_seconds,
                    )
            self._registry.register(info, load)
        for number in range(fleet.num_workers):
            is_prefill = number < fleet.num_prefill
            profile = fleet.profile_of(number)
            info = pb.WorkerInfo(
                worker_id=worker_id(number),
                incarnation=worker_id(number),
                role=pb.WORKER_ROLE_PREFILL if is_prefill else pb.WORKER_ROLE_DECODE,
                card=pb.ModelCard(
                    model_id=fleet.model_of(number) or _MODEL,
                    context_length=_CONTEXT_LENGTH,
                    block_size=GRAIN,
                    takes_spaces=True,
                    fingerprint=pb.Fingerprint(weights_digest=fleet.model_of(number)),
                ),
                host_id=_host_id(fleet.host_of(number)),
                kv_address=_kv_address(fleet.host_of(number)),
            )
            empty = Report(number, 0, 0, 0, profile.kv_tokens, 0, 0, 0.0, 0.0, 0, 0.0)
            self._registry.register(info, _load_of(empty, profile))

    def worker(self, number: int) -> Worker:
        worker = self._registry.get(worker_id(number))
        assert worker is not None, "simulated workers never leave"
        return worker

    def report(self, report: Report, now: float) -> None:
        self._now = now
        profile = self.fleet.profile_of(report.number)
        beat = cp.HeartbeatRequest(
            worker_id=worker_id(report.number),
            incarnation=worker_id(report.number),
            kv_address=_kv_address(self.fleet.host_of(report.number)),
            load=_load_of(report, profile),
        )
        is_known = self._registry.heartbeat(beat)
        assert is_known, "the worker was registered at the start"

    # ------------------------------------------------------------------------------------------------- the requests

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        self._now = now
        hashes = chain_of(request)
        routing = RoutingRequest(
            request.model if self.fleet.models else _MODEL,
            request.num_prompt_tokens,
            request.requested_tokens,
            hashes,
            GRAIN,
            request.session,
            hand_over=self._hand_over,
        )
        route = self.routed(routing)
        if route is None:
            return None
        estimate = route.estimate(route.prefill or route.decodes[0])
        cached = estimate.cached if estimate is not None else None
        source = estimate.cached.source_id if estimate is not None else ""
        return Placement(
            None if route.prefill is None else _number_of(route.prefill),
            tuple(map(_number_of, route.decodes)),
            int(source.removeprefix("kv-")) if source else None,
            0 if cached is None else cached.own + cached.host + cached.remote,
            Flight(route, hashes),
        )

    def routed(self, routing: RoutingRequest) -> Route | None:
        """Return the route of a request; None: it has to wait."""
        try:
            return self.router.choose(routing)
        except Overloaded:
            return None

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        flight = placement.handle
        assert isinstance(flight, Flight)
        in_flight, prefill = self.router.in_flight, flight.route.prefill
        computes = self.worker(decode) if prefill is None else prefill
        estimate = flight.route.estimate(computes)
        num_to_compute = request.num_prompt_tokens if estimate is None else estimate.num_computed_tokens
        if prefill is not None:
            flight.prefill = in_flight.add(prefill.incarnation, num_prefill_tokens=num_to_compute)
        flight.decode = in_flight.add(
            worker_id(decode),
            num_prefill_tokens=num_to_compute if prefill is None else 0,
            num_decode_tokens=request.num_prompt_tokens + request.requested_tokens,
            num_answers=1,
        )
        self._flights[request.number] = flight
        self.router.affinity.remember(
            request.session, SessionRoute(prefill.incarnation if prefill else "", worker_id(decode))
        )

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        flight, reader = self._flights[request.number], self.worker(worker)
        host_id = reader.info.host_id if self.fleet.store_tokens and not was_pulled else ""
        self.router.prefixes.learn(flight.hashes, reader.incarnation, host_id, space=index_space(reader))
        if was_pulled:
            return
        ledger = pb.PhaseLedger(
            scheduled_ns=1 + round(1e9 * job.scheduled_at),
            first_token_ns=1 + round(1e9 * job.first_token_at),
            num_computed_tokens=job.num_computed,
            num_cached_tokens=job.num_cached,
        )
        self.router.costs.prompt_read(reader, ledger)
        self._compare(flight, reader, job)
        entry = flight.decode if job.decodes else flight.prefill
        assert entry is not None
        entry.prompt_read()
        if not job.decodes:
            entry.remove()
            flight.prefill_ledger = ledger

    def _compare(self, flight: Flight, reader: Worker, job: Job) -> None:
        """Let the router learn what was not where it was expected."""
        estimate = flight.route.estimate(reader)
        if estimate is None:
            return
        cached, num_found = estimate.cached, job.num_cached - estimate.cached.own
        self.router.costs.stores.used(reader.info.host_id, cached.host, num_found)
        if num_found >= cached.host:
            num_fetched = num_found - cached.host
            self.router.costs.stores.used_from_afar(cached.remote_host, reader.info.host_id, cached.remote, num_fetched)
        num_missing = cached.host + cached.remote - max(0, num_found)
        if cached.remote and num_missing > 0:
            end = (cached.own + cached.host + cached.remote) // GRAIN
            first = end - min(num_missing, cached.remote) // GRAIN
            self.router.prefixes.forget(flight.hashes[first:end], cached.remote_host, first, index_space(reader))

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        flight = self._flights.pop(request.number)
        assert flight.decode is not None
        flight.decode.remove()
        if flight.prefill_ledger is not None and hand_over_seconds is not None:
            writer, reader = flight.route.prefill, self.worker(decode)
            assert writer is not None, "a prefill worker has read the prompt"
            num_moved = request.num_prompt_tokens - flight.route.own_tokens(reader)
            num_bytes = round(num_moved * reader.figures.bytes_per_token)
            self.router.costs.handed_over(writer, flight.prefill_ledger, reader, num_bytes, 1000.0 * hand_over_seconds)


def chain_of(request: TraceRequest) -> BlockHashes:
    """Return the hashes of a prompt's full blocks, in the fleet's grain."""
    num_hashes = request.block_tokens // GRAIN
    return BlockHashes(b"".join(_hashes_of(hash_id, num_hashes) for hash_id in request.full_blocks))


@lru_cache(maxsize=1 << 16)
def _hashes_of(hash_id: int, number: int) -> bytes:
    """Return the hashes of a block of a trace. Its id stands for the blocks before it, too, as a chain's hash does."""
    return hashlib.shake_128(hash_id.to_bytes(16, "little", signed=True)).digest(number * NUM_HASH_BYTES)


def _load_of(report: Report, profile: WorkerProfile) -> pb.LoadReport:
    num_total = report.num_total_tokens // GRAIN
    num_used = min(num_total, -(-report.num_used_tokens // GRAIN))
    num_cached = min(num_total - num_used, report.num_cached_tokens // GRAIN)
    return pb.LoadReport(
        state=pb.WORKER_STATE_READY,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_tokens_in_flight=report.num_tokens_in_flight,
        kv=pb.KvPool(
            num_total_blocks=num_total,
            num_free_blocks=num_total - num_used - num_cached,
            num_cached_blocks=num_cached,
            num_used_blocks=num_used,
            tokens_per_block=GRAIN,
            bytes_per_block=GRAIN * profile.bytes_per_token,
        ),
        counters={
            "steps": report.num_steps,
            "step_seconds": report.step_seconds,
            "prompt_tokens_computed": report.num_computed,
            "tokens_generated": report.num_generated,
        },
    )


def worker_id(number: int) -> str:
    return f"worker-{number}"


def _number_of(worker: Worker) -> int:
    return int(worker.worker_id.removeprefix("worker-"))


def _kv_id(host: int) -> str:
    return f"kv-{host}"


def _host_id(host: int) -> str:
    return f"host-{host}"


def _kv_address(host: int) -> str:
    return f"10.0.0.1:{host + 1}"
