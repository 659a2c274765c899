"""Large fleets are scored in columns: the route is as good as if all workers had been compared."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec
import pytest

from control_plane.fleet.attached import Attached
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing import scoring
from control_plane.routing.compiled_library import CompiledRouting
from control_plane.routing.cost_model import InFlightEntry, PrefillEstimate, RoutingRequest
from control_plane.routing.groups import TIE, index_space
from control_plane.routing.router import Route, Router
from control_plane.routing.sample_points import SamplePointIndex
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ContextTooLong, ModelNotFound, Overloaded
from tests.control_plane.routing.compiled import compiled_routing

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
NUM_WORKERS, GRAIN, TIGHT = 30, 16, 4
CHAIN = [bytes([number]) * 16 for number in range(64)]
PROMPT = RoutingRequest("m", 64 * GRAIN + 1, 64, CHAIN, GRAIN)
UNCACHED = RoutingRequest("m", 64 * GRAIN + 1, 64)


class Harness:
    """Thirty decode and thirty prefill workers on hosts of two, each host with a KV service with a store."""

    compiled: CompiledRouting | None = None

    def __init__(self, seed: int = 0) -> None:
        self.now, self.rng = 0.0, random.Random(seed)
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.router = Router(
            self.registry,
            prefixes=SamplePointIndex(compiled=self.compiled),
            rng=random.Random(seed),
            clock=lambda: self.now,
            compiled=self.compiled,
        )
        self.entries: list[InFlightEntry] = []
        for number in range(NUM_WORKERS):
            host = f"h{number}"
            info = pb.WorkerInfo(worker_id=f"kv{number}", incarnation=f"kv{number}-1", role=pb.WORKER_ROLE_KV)
            info.host_id = info.address = host
            store = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1))
            self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=store))
            self.add(f"d{number}", DECODE, host)
            self.add(f"p{number}", PREFILL, host)

    def add(
        self, name: str, role: pb.WorkerRole.ValueType, host: str, incarnation: str = "1", numerics: str = ""
    ) -> None:
        card = pb.ModelCard(model_id="m", context_length=4096, block_size=GRAIN)
        card.fingerprint.numerics_class = numerics
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-{incarnation}", role=role, card=card)
        info.host_id = info.kv_address = host
        self.registry.register(info, self.load())

    def load(self, num_free: int = 1000, rate: float = 1000.0, **fields: Any) -> pb.LoadReport:
        pool = pb.KvPool(num_total_blocks=1000, num_free_blocks=num_free, tokens_per_block=GRAIN, bytes_per_block=1000)
        counters = {"prompt_tokens_computed": rate, "step_seconds": 1.0, "steps": 100.0}
        return pb.LoadReport(state=pb.WORKER_STATE_READY, kv=pool, counters=counters, **fields)

    def report(self, name: str, load: pb.LoadReport) -> None:
        beat = cp.HeartbeatRequest(worker_id=name, incarnation=f"{name}-1", load=load, kv_address=f"h{name[1:]}")
        assert self.registry.heartbeat(beat)

    def send(self, name: str, num_prompt: int, num_tokens: int = 0) -> None:
        add = self.router.in_flight.add
        self.entries.append(
            add(f"{name}-1", num_prefill_tokens=num_prompt, num_decode_tokens=num_tokens, num_answers=1)
        )

    def busy(self) -> None:
        """Give all workers different work and speeds; some pools are nearly full."""
        for number in range(NUM_WORKERS):
            queued, held = self.rng.randrange(5_000), self.rng.randrange(10_000)
            speed, num_free = self.rng.uniform(500, 2000), self.rng.choice((TIGHT, 1000))
            self.report(f"p{number}", self.load(rate=speed, num_tokens_in_flight=queued))
            running = self.rng.randrange(8)
            self.report(f"d{number}", self.load(num_free=num_free, num_tokens_in_flight=held, num_running=running))
            self.send(f"p{number}", self.rng.randrange(5_000))
            self.send(f"d{number}", self.rng.randrange(1_000), self.rng.randrange(10_000))
        self.now += 0.5
        for entry in self.entries[::3]:
            entry.remove()

    def learn(self, name: str, num_blocks: int) -> None:
        (worker,) = [each for each in self.registry.workers() if each.worker_id == name]
        self.router.prefixes.learn(CHAIN[:num_blocks], f"{name}-1", "", space=index_space(worker))

    def names(self, request: RoutingRequest = UNCACHED, times: int = 40) -> Counter[str]:
        """Return the workers that were chosen first, and how often."""
        routes = [self.router.choose(request) for _ in range(times)]
        return Counter(name for route in routes for name in (route.prefill_id, route.decode_id) if name)


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with numpy, and with the compiled library."""
    if request.param == "compiled":
        monkeypatch.setattr(Harness, "compiled", compiled_routing())
    return str(request.param)


@pytest.mark.parametrize("hand_over", ["if_cheaper", "always", "never"])
@pytest.mark.parametrize("seed", range(3))
def test_a_route_costs_as_much_as_the_best_of_all_workers(
    seed: int, hand_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(seed)
    harness.busy()
    request = RoutingRequest("m", harness.rng.choice((20, 500, 3000)), 64, hand_over=hand_over)  # type: ignore[arg-type]
    routes = [harness.router.choose(request) for _ in range(10)]
    monkeypatch.setattr(scoring, "MAX_COMPARED", NUM_WORKERS)
    monkeypatch.setattr(Harness, "compiled", None)
    whole = Harness(seed)
    whole.busy()
    best = min((whole.router.choose(request) for _ in range(3)), key=lambda route: route.cost)
    assert len(best.decodes) == NUM_WORKERS > max(len(route.decodes) for route in routes)
    for route in routes:
        assert route.cost[0] == best.cost[0] and route.cost[1] <= TIE * TIE * best.cost[1]
        assert (route.prefill is None) == (best.prefill is None) or route.cost[1] <= TIE * best.cost[1]


def _types(value: object) -> set[type]:
    """Return the types of all numbers in a value, in its mappings, its sequences and its fields."""
    if isinstance(value, Mapping):
        return set().union(*map(_types, value.values()))
    if isinstance(value, tuple | list):
        return set().union(*map(_types, value))
    if isinstance(value, msgspec.Struct):
        return set().union(*(_types(getattr(value, name)) for name in value.__struct_fields__))
    if dataclasses.is_dataclass(value) and not isinstance(value, Worker):
        return set().union(*(_types(getattr(value, each.name)) for each in dataclasses.fields(value)))
    return {type(value)} if isinstance(value, Real) else set()


@pytest.mark.parametrize("hand_over", ["if_cheaper", "always", "never"])
def test_the_numbers_of_a_route_are_pythons_own_for_its_explanation_is_written_as_json(hand_over: str) -> None:
    harness = Harness()
    harness.busy()
    harness.add("p-new", PREFILL, "h0")  # no rate of its own is known
    harness.add("d-new", DECODE, "h0")
    for request in (PROMPT, UNCACHED):
        route = harness.router.choose(dataclasses.replace(request, hand_over=hand_over))  # type: ignore[arg-type]
        assert float in _types(route) <= {int, float, bool}


def test_idle_workers_are_all_chosen_now_and_then() -> None:
    harness = Harness()
    chosen = harness.names(times=400)
    assert len(chosen) == 2 * NUM_WORKERS and max(chosen.values()) < 50


@pytest.mark.parametrize("num_queued", [15, 40])
def test_a_queue_counts_though_the_prompt_takes_much_longer(num_queued: int) -> None:
    """With 1,025 tokens to compute, 40 more are 4 %: less than predictions are wrong by, but certainly there."""
    harness = Harness()
    for number in range(5, NUM_WORKERS):
        harness.send(f"p{number}", num_queued)
    chosen = harness.names(dataclasses.replace(UNCACHED, hand_over="always"), times=400)
    prefills = {name for name in chosen if name.startswith("p")}
    assert prefills == {f"p{number}" for number in range(5 if num_queued == 40 else NUM_WORKERS)}


def test_what_is_sent_and_reported_counts_at_once() -> None:
    harness = Harness()
    for number in range(1, NUM_WORKERS):
        harness.send(f"p{number}", 1000)
        harness.send(f"d{number}", 1000, 1000)
    assert set(harness.names()) == {"p0", "d0"}
    for entry in harness.entries:
        entry.remove()
    harness.report("p0", harness.load(num_tokens_in_flight=10_000))
    harness.report("d0", harness.load(num_tokens_in_flight=10_000))
    assert not {"p0", "d0"} & set(harness.names())


def test_workers_that_leave_or_are_not_ready_are_no_candidates() -> None:
    harness = Harness()
    ready = {f"{role}{number}" for role in "dp" for number in range(20, NUM_WORKERS)}
    for number in range(20):
        for role in "dp":
            if number % 2:
                harness.registry.deregister(f"{role}{number}", f"{role}{number}-1")
            else:
                harness.report(f"{role}{number}", pb.LoadReport(state=pb.WORKER_STATE_DRAINING))
    assert set(harness.names(times=200)) == ready
    harness.report("d0", harness.load())
    harness.add("d29", DECODE, "h29", incarnation="2")
    routes = [harness.router.choose(UNCACHED) for _ in range(200)]
    incarnations = {worker.incarnation for route in routes for worker in route.decodes}
    assert "d0-1" in incarnations and "d29-2" in incarnations and "d29-1" not in incarnations


def test_who_has_the_prompt_or_the_session_is_a_candidate_among_many_that_are_as_idle() -> None:
    harness = Harness()
    harness.learn("p7", 60)
    assert harness.names(PROMPT)["p7"] == 40
    harness.router.affinity.remember("s", SessionRoute("p3-1", "d11-1"))
    session = RoutingRequest("m", 500, 64, session_id="s")
    assert harness.names(session) == {"p3": 40, "d11": 40}


def test_sick_workers_are_passed_over_however_idle_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    well = {"d28", "d29", "p28", "p29"}
    for number in (28, 29):
        harness.send(f"p{number}", 100)
        harness.send(f"d{number}", 0, 1000)
    harness.router.health.ask_links(Attached({f"{name}-1" for name in well}))
    monkeypatch.setattr(harness.router.health, "usable", None)  # of the last resort, when none is found
    assert set(harness.names()) == well
    for name in ("p1", "p2", "d1", "d2"):
        harness.learn(name, 60)
    assert set(harness.names(PROMPT)) <= well


def test_prefill_workers_without_a_kv_service_are_no_candidates() -> None:
    harness = Harness()
    for number in range(1, NUM_WORKERS):
        harness.registry.deregister(f"kv{number}", f"kv{number}-1")
    harness.send("p0", 100)
    assert {name for name in harness.names() if name.startswith("p")} == {"p0"}


def test_of_full_workers_the_least_loaded_are_candidates_though_one_idles_that_cannot_be_reached() -> None:
    harness, names = Harness(), [f"{role}{number}-1" for role in "pd" for number in range(NUM_WORKERS)]
    for number in range(NUM_WORKERS - 1):
        harness.report(f"d{number}", harness.load(num_free=TIGHT))
        harness.send(f"d{number}", 0, 400 * (number + 1))
    harness.router.health.ask_links(Attached(set(names) - {f"d{NUM_WORKERS - 1}-1"}))
    routes = [harness.router.choose(UNCACHED) for _ in range(20)]
    assert all(route.decodes[0].worker_id == "d0" for route in routes)


def test_refusals_and_pools_that_are_too_small_end_as_with_few_workers() -> None:
    harness = Harness()
    avoid = {f"d{number}-1" for number in range(NUM_WORKERS - 1)}
    assert harness.router.choose(PROMPT, avoid).decode_id == f"d{NUM_WORKERS - 1}"
    with pytest.raises(Overloaded):
        harness.router.choose(PROMPT, {*avoid, f"d{NUM_WORKERS - 1}-1"})
    for number in range(NUM_WORKERS):
        pool = pb.KvPool(num_total_blocks=10, num_free_blocks=10, tokens_per_block=GRAIN)
        harness.report(f"d{number}", pb.LoadReport(state=pb.WORKER_STATE_READY, kv=pool))
    with pytest.raises(ContextTooLong):
        harness.router.choose(PROMPT)


def test_a_worker_without_waiting_requests_is_among_the_candidates_if_there_is_one() -> None:
    harness = Harness()
    for number in range(NUM_WORKERS):
        harness.report(f"d{number}", harness.load(num_waiting=1))
    assert harness.router.is_busy(harness.router.choose(PROMPT).decodes)
    harness.report("d5", harness.load(num_tokens_in_flight=15_000))
    routes: list[Route] = [harness.router.choose(PROMPT) for _ in range(20)]
    assert not any(harness.router.is_busy(route.decodes) for route in routes)
    assert all(route.decode_id != "d5" for route in routes)


def test_choices_count_the_pools_of_all_workers() -> None:
    harness = Harness()
    assert (
        harness.router.choose(RoutingRequest("m", 3_000, 64, num_choices=128, hand_over="always")).prefill is not None
    )
    assert harness.router.choose(RoutingRequest("m", 3_999, 64, num_choices=129, hand_over="always")).prefill is None


def test_of_a_model_of_two_classes_each_group_is_as_short_and_gets_work_by_its_capacity() -> None:
    harness = Harness()
    for number in range(10):
        harness.add(f"e{number}", DECODE, "h0", numerics="b")
    asked = RoutingRequest("m", 500, 64, hand_over="never")
    routes = [harness.router.choose(asked) for _ in range(400)]
    assert max(len(route.decodes) for route in routes) <= scoring.NUM_CANDIDATES + 1
    assert 60 <= sum(route.decode_id[0] == "e" for route in routes) <= 140, "a quarter of the pools"
    assert all(len({worker.worker_id[0] for worker in route.decodes}) == 1 for route in routes)


def test_a_choice_that_moves_goes_to_its_class_among_many() -> None:
    harness = Harness()
    for number in range(3):
        harness.add(f"e{number}", DECODE, "h0", numerics="b")
    moved = RoutingRequest("m", 500, 64, hand_over="never", preferred_class="b")
    assert {harness.router.choose(moved).decode_id for _ in range(20)} <= {"e0", "e1", "e2"}
    others = harness.router.choose(moved, {"e0-1", "e1-1", "e2-1"})
    assert others.decode_id[0] == "d"


def test_if_no_worker_is_well_the_least_bad_ones_are_used() -> None:
    harness = Harness()
    for number in range(NUM_WORKERS):
        for name in (f"d{number}", f"p{number}"):
            worker = harness.registry.get(name)
            assert worker is not None
            if number == 7:
                harness.router.health.answered(harness.router.health.watch(worker, None))
            for _ in range(3):
                harness.router.health.watch(worker, None).failed("it broke", "failed", is_certain=False)
    assert harness.names(RoutingRequest("m", 500, 64)) == {"p7": 40, "d7": 40}


def test_a_decision_looks_at_few_of_a_thousand_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, num_seen = Harness(), 0
    for number in range(NUM_WORKERS, 500):
        harness.add(f"d{number}", DECODE, f"h{number % NUM_WORKERS}")
        harness.add(f"p{number}", PREFILL, f"h{number % NUM_WORKERS}")
    harness.learn("p7", 60)
    well, comparing = harness.router.health.well, harness.router._comparing

    def counted(workers: list[Worker]) -> list[Worker]:
        nonlocal num_seen
        num_seen += len(workers)
        return well(workers)

    if comparing is not None:
        estimates = comparing._estimates

        def counted_estimates(*arguments: Any) -> list[PrefillEstimate] | None:
            nonlocal num_seen
            found = estimates(*arguments)
            num_seen += len(found or [])
            return found

        monkeypatch.setattr(comparing, "_estimates", counted_estimates)
    harness.router.choose(UNCACHED)  # a change of a KV service is looked at once
    monkeypatch.setattr(harness.router.health, "well", counted)
    monkeypatch.setattr(harness.registry, "workers", None)
    for asked in (PROMPT, UNCACHED, RoutingRequest("m", 500, 64, session_id="s")):
        num_seen = 0
        assert len(harness.router.choose(asked).decodes) < 12 and 0 < num_seen <= 24
    num_seen = 0
    with pytest.raises(ModelNotFound, match="served here: m"):
        harness.router.choose(RoutingRequest("another", 500, 64))
    assert num_seen == 0


def test_a_host_may_lose_its_kv_service_where_all_have_large_arenas() -> None:
    """Free bytes and windows are whole numbers then, and those of a host without one are infinite."""
    harness = Harness()
    for number in range(NUM_WORKERS):
        service = pb.KvServiceLoad(arena_bytes=1 << 28, arena_free_bytes=1 << 28, store=pb.KvStoreLoad(total_bytes=1))
        load = pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=service)
        beat = cp.HeartbeatRequest(worker_id=f"kv{number}", incarnation=f"kv{number}-1", load=load)
        assert harness.registry.heartbeat(beat)
    harness.router.choose(UNCACHED)
    harness.registry.deregister("kv7", "kv7-1")
    assert "p7" not in harness.names()
