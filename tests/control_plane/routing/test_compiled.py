"""The compiled library chooses as numpy does: the same workers in the same order, and the same places of a prompt."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import numpy as np
import pytest
import structlog.testing

from control_plane.block_chain import BlockHashes
from control_plane.compiled_routing import load_routing
from control_plane.fleet.attached import Attached
from control_plane.fleet.call_watch import CallWatch
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.compiled_comparing import CompiledComparing
from control_plane.routing.compiled_library import CompiledRouting, file_name
from control_plane.routing.cost_model import HandOver, InFlightEntry, RoutingRequest
from control_plane.routing.groups import Group, index_space
from control_plane.routing.hand_overs import Shown
from control_plane.routing.router import Route, Router
from control_plane.routing.sample_points import PlaceChanges, SamplePointIndex, num_sample_points, sample_positions
from control_plane.routing.scoring import Choice, NumpyScoring, Scored, Scoring, Way
from control_plane.routing.session_affinity import SessionRoute
from control_plane.routing.shortlist import Query
from control_plane.routing.worker_table import WorkerTable
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tests.control_plane.routing.compiled import compiled_routing
from tests.tandem_engine.ops.test_cpu_compile import COMPILER

GRAIN = 16
HAND_OVERS: tuple[HandOver, ...] = ("if_cheaper", "if_cheaper", "always", "never")


class Both:
    """Scores with numpy and the library, which must agree in every bit."""

    def __init__(self, numpy: Scoring, compiled: Scoring) -> None:
        self._numpy, self._compiled = numpy, compiled

    def prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> Scored:
        wanted = self._numpy.prefills(table, request, choice)
        return _same(self._compiled.prefills(table, request, choice), wanted)

    def decodes(self, table: WorkerTable, request: RoutingRequest, way: Way | None, choice: Choice) -> Scored:
        wanted = self._numpy.decodes(table, request, way, choice)
        return _same(self._compiled.decodes(table, request, way, choice), wanted)


def _same(found: Scored, wanted: Scored) -> Scored:
    assert found.score.tolist() == wanted.score.tolist()
    assert (found.home, found.picked) == (wanted.home, wanted.picked)
    return found


class CountingRouter(Router):
    """Counts the routes that the library compared the workers of."""

    num_compared = 0

    def _compiled_route(self, comparing: CompiledComparing, group: Group, query: Query) -> Route | None:
        route = super()._compiled_route(comparing, group, query)
        self.num_compared += route is not None
        return route


class Fleet:
    """A fleet in which all that a decision depends on changes all the time; equal for equal seeds."""

    def __init__(self, seed: int, compiled: CompiledRouting | None) -> None:
        self.now, self.rng = 100.0, random.Random(seed)
        self.registry = WorkerRegistry(1e9, 1e9, lambda: self.now)
        index = SamplePointIndex(10_000, lambda: self.now, compiled)
        health = WorkerHealth(self.registry, lambda: self.now)
        self.router = CountingRouter(
            self.registry,
            prefixes=index,
            rng=random.Random(seed),
            health=health,
            clock=lambda: self.now,
            compiled=compiled,
        )
        if compiled is not None:
            shortlist, costs = self.router._shortlist, self.router.costs
            shortlist._scoring = Both(NumpyScoring(costs, lambda: self.now), shortlist._scoring)
        self.prompts = [BlockHashes(self.rng.randbytes(16 * self.rng.randrange(1, 200))) for _ in range(8)]
        self.entries: list[InFlightEntry] = []
        self.watches: list[CallWatch] = []
        self.attached = Attached()
        health.ask_links(self.attached)
        self.share_of_arenas = self.rng.choice((0.5, 1.0))
        self.num_hosts, self.num_workers = self.rng.randrange(1, 20), 0
        for host in range(self.num_hosts):
            self.kv_service(host)
        for _ in range(self.rng.choice((3, 12, 60))):
            self.joins()

    def kv_service(self, host: int) -> None:
        info = pb.WorkerInfo(worker_id=f"kv{host}", incarnation=f"kv{host}", role=pb.WORKER_ROLE_KV)
        info.host_id, info.address = f"h{host}", f"h{host}-new" if self.rng.random() < 0.05 else f"h{host}"
        self.registry.register(info, self.kv_load())

    def kv_load(self) -> pb.LoadReport:
        rng, service = self.rng, pb.KvServiceLoad()
        if rng.random() < 0.95:
            service.store.total_bytes = 1 << 30
        for other in rng.sample(range(self.num_hosts), rng.randrange(self.num_hosts)):
            speed = rng.choice((1e5, 1e8, 1e10))
            service.links.add(address=f"h{other}", latency_ms=rng.choice((1.0, 80.0, 400.0)), bytes_per_second=speed)
        if rng.random() < self.share_of_arenas:
            size = 1 << rng.choice((20, 28))
            service.arena_bytes, service.arena_free_bytes = size, rng.choice((0, rng.randrange(size)))
        return pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=service)

    def joins(self) -> None:
        number, roles = self.num_workers, (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL)
        role = roles[number] if number < 2 else self.rng.choice(roles)
        self.num_workers += 1
        card = pb.ModelCard(model_id="m", context_length=8_192, block_size=GRAIN)
        info = pb.WorkerInfo(worker_id=f"w{number}", incarnation=f"w{number}", role=role, card=card)
        info.host_id = f"h{self.rng.randrange(self.num_hosts)}"
        info.kv_address = "" if self.rng.random() < 0.05 else info.host_id
        if self.rng.random() < 0.5:
            info.settings.update({"max_num_batched_tokens": "256", "max_num_seqs": "3"})
        self.registry.register(info, self.load())
        self.attached.add(info.incarnation)

    def load(self) -> pb.LoadReport:
        load, rng = pb.LoadReport(state=pb.WORKER_STATE_READY), self.rng
        if rng.random() < 0.95:
            load.kv.num_total_blocks, load.kv.tokens_per_block = rng.choice((100, 1_000)), GRAIN
            load.kv.num_free_blocks, load.kv.bytes_per_block = rng.choice((0, 3, 90)), rng.choice((4_096, 1 << 21))
        if rng.random() < 0.8:
            load.counters.update({"prompt_tokens_computed": rng.uniform(500, 5_000), "step_seconds": 1.0})
            load.counters.update({"steps": rng.choice((50.0, 100.0)), "tokens_generated": 100.0})
        load.num_tokens_in_flight, load.num_running = rng.choice((0, rng.randrange(9_000))), rng.randrange(4)
        load.num_waiting = rng.choice((0, 0, 2))
        return load

    def changes(self) -> None:
        """Let one or two things happen."""
        rng, self.now = self.rng, self.now + self.rng.choice((0.001, 0.3))
        worker = rng.choice([each for each in self.registry.workers() if each.role != pb.WORKER_ROLE_KV])
        name, what = worker.incarnation, rng.random()
        if what < 0.05:
            self.joins()
        elif what < 0.08 and len(self.registry.workers()) > self.num_hosts + 2:
            self.registry.deregister(worker.worker_id, name)
        elif what < 0.5:
            beat = cp.HeartbeatRequest(worker_id=name, incarnation=name, load=self.load())
            beat.kv_address = worker.info.kv_address
            self.registry.heartbeat(beat)
        elif what < 0.6:
            self.router.health.watch(worker, 0.1).failed("it failed")
        elif what < 0.7:
            prompt, length = rng.choice(self.prompts), rng.randrange(1, 200)
            host = rng.choice(("", worker.info.host_id))
            self.router.prefixes.learn(prompt[:length], name, host, space=index_space(worker))
        elif self.entries and what < 0.8:
            self.entries.pop(rng.randrange(len(self.entries))).remove()
        elif what < 0.805:
            self.kv_service(rng.randrange(self.num_hosts))
        elif what < 0.83:
            kv = f"kv{rng.randrange(self.num_hosts)}"
            self.registry.heartbeat(cp.HeartbeatRequest(worker_id=kv, incarnation=kv, load=self.kv_load()))
        else:
            self.learns(worker, what)

    def learns(self, worker: Worker, what: float) -> None:
        """Let the router learn from an ended request."""
        rng, costs = self.rng, self.router.costs
        hosts = [f"h{rng.randrange(self.num_hosts)}" for _ in range(2)]
        num_found = rng.randrange(1_000)
        if what < 0.85:
            costs.stores.used(hosts[0], 1_000, num_found)
        elif what < 0.88:
            costs.stores.used_from_afar(hosts[0], hosts[1], 1_000, num_found)
        elif what < 0.91 and worker.role == pb.WORKER_ROLE_DECODE:
            ledger = pb.PhaseLedger(scheduled_ns=1, first_token_ns=num_found * 1_000_000, num_computed_tokens=500)
            costs.prompt_read(worker, ledger)
        elif what > 0.95:
            self.calls(worker)
        elif worker.role == pb.WORKER_ROLE_DECODE:
            what_was_shown = Shown(2_000, 500, 100.0, rng.uniform(0, 400))
            costs.hand_overs.ended(what_was_shown, hosts[0], worker, 1 << 24, rng.uniform(0, 200))

    def calls(self, worker: Worker) -> None:
        """Send a call, let one begin or bring its first token, or lose a stream."""
        rng, what = self.rng, self.rng.random()
        if what < 0.4 or not self.watches:
            self.watches.append(self.router.health.watch(worker, rng.choice((None, 0.01, 1.0))))
        elif what < 0.6:
            rng.choice(self.watches).begin(0.05)
        elif what < 0.9:
            self.watches.pop(rng.randrange(len(self.watches))).output()
        else:
            self.attached ^= {worker.incarnation}

    def request(self) -> RoutingRequest:
        rng = self.rng
        prompt = rng.choice([*self.prompts, BlockHashes(rng.randbytes(16 * rng.randrange(1, 100)))])
        session = rng.choice(("", "", f"session-{rng.randrange(20)}"))
        max_tokens = rng.choice((1, 100, 1_000))
        num_tokens = GRAIN * len(prompt) + rng.randrange(GRAIN)
        return RoutingRequest("m", num_tokens, max_tokens, prompt, GRAIN, session, rng.choice(HAND_OVERS))

    def decided(self) -> tuple[object, ...]:
        """Choose for a request, count the route, and return it."""
        request = self.request()
        for role in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):  # a mean of half a second: of the same moment
            self.router.costs.typical_rate("m", "", role)
        workers = [each.incarnation for each in self.registry.workers()]
        avoid = set(self.rng.sample(workers, self.rng.choice((0, 0, 1, len(workers) // 2))))
        try:
            route = self.router.choose(request, avoid)
        except TandemError as error:
            return (str(error),)
        add = self.router.in_flight.add
        self.entries.append(add(route.decodes[0].incarnation, num_decode_tokens=100, num_answers=1))
        if route.prefill is not None:
            self.entries.append(add(route.prefill.incarnation, num_prefill_tokens=request.num_prompt_tokens))
        prefill = "" if route.prefill is None else route.prefill.incarnation
        self.router.affinity.remember(request.session_id, SessionRoute(prefill, route.decodes[0].incarnation))
        return _as_text(route)


def _as_text(route: Route) -> tuple[object, ...]:
    decodes = [each.worker_id for each in route.decodes]
    estimates = [(each.worker.worker_id, each.cached, str(each)) for each in route.estimates.values()]
    return route.prefill_id, decodes, route.cost, route.predicted_ms, estimates, route.explained()


@pytest.mark.parametrize("seed", range(60))
def test_routes_are_those_that_numpy_chooses(seed: int) -> None:
    ours, other = Fleet(seed, compiled_routing()), Fleet(seed, None)
    kinds = set()
    for _ in range(90):
        ours.changes()
        other.changes()
        chosen = ours.decided()
        assert chosen == other.decided()
        kinds.add(len(chosen))
    assert kinds >= {6}, "no route was chosen at all"


def test_the_library_compares_the_workers_of_most_requests() -> None:
    fleets = [Fleet(seed, compiled_routing()) for seed in range(10)]
    for fleet in fleets:
        for _ in range(30):
            fleet.changes()
            fleet.decided()
    assert sum(fleet.router.num_compared for fleet in fleets) > 150


def _chain(rng: random.Random) -> BlockHashes:
    return BlockHashes(rng.randbytes(16 * rng.choice((1, 2, 7, 15, 16, 17, 40, 300))))


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_that_numpy_finds_in_their_order(seed: int) -> None:
    rng = random.Random(seed)
    ours, other = SamplePointIndex(200_000, compiled=compiled_routing()), SamplePointIndex(200_000)  # never full
    chains, num_found = [_chain(rng) for _ in range(30)], 0
    for _ in range(300):
        chain, space = rng.choice(chains), rng.choice((b"", bytes(range(16))))
        mixed = BlockHashes(chain[: rng.randrange(len(chain) + 1)].packed + _chain(rng).packed)
        name, host = f"w{rng.randrange(12)}", f"h{rng.randrange(5)}"
        what = rng.random()
        for index in (ours, other):
            if what < 0.6:
                index.learn(mixed, name, host if what < 0.4 else "", space=space)
            elif what < 0.75:
                points = sample_positions(num_sample_points(len(mixed)))
                keys = np.array([int.from_bytes(mixed[each][:8], "little") for each in points.tolist()], np.uint64)
                index.report([PlaceChanges(name, host, keys, keys[:0])])
            elif what < 0.8:
                index.forget_pool(name)
            elif what < 0.85:
                index.forget(chain, host, space=space)
        for asked in (mixed, chain, list(chain), mixed[:0]):
            found, wanted = ours.find(asked, space), other.find(asked, space)
            assert list(found.pools.items()) == list(wanted.pools.items())
            assert list(found.hosts.items()) == list(wanted.hosts.items())
            num_found += bool(found.pools)
    assert num_found > 100


def test_a_key_of_zeros_is_found() -> None:
    index = SamplePointIndex(compiled=compiled_routing())
    index.learn(BlockHashes(bytes(16)), "a", "")
    assert index.find(BlockHashes(bytes(16))).pools == {"a": 1}


def test_the_library_of_the_package_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_routing()
    built = next((tmp_path / "built").glob("*.so")) if load_routing(tmp_path / "built", tmp_path / "none") else None
    assert built is not None
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    (prebuilt / file_name(platform.machine())).write_text("damaged")
    assert load_routing(tmp_path / "built", prebuilt) is not None, "what the package has is of no use: it is compiled"
    built.rename(prebuilt / file_name(platform.machine()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert load_routing(tmp_path / "empty", prebuilt) is not None
    assert load_routing(tmp_path / "empty", tmp_path / "none") is None, "no compiler, and no library"


def test_a_file_that_is_no_library_leaves_the_work_to_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "imitation"
    compiler.write_text(COMPILER.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with structlog.testing.capture_logs() as logs:
        assert load_routing(tmp_path / "cache", tmp_path / "none") is None
    (told,) = logs
    assert told["event"] == "routing_not_compiled" and "delete the file to compile it again" in told["reason"]


@pytest.mark.parametrize("says", ["", "\\377\\376"])
def test_a_compiler_that_says_nothing_or_no_text_is_used(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_routing()
    compiler = tmp_path / "odd"
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then printf \'{says}\'; else exec g++ "$@"; fi\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_routing(tmp_path / "cache", tmp_path / "none") is not None
