"""A request goes to suitable workers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Router
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ContextTooLong, ModelNotFound, Overloaded, Unavailable
from tests.control_plane.routing.first_choice import FirstChoice

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
READY = pb.WORKER_STATE_READY
KV_ADDRESS = "127.0.0.1:1"


class Harness:
    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.router = Router(self.registry, "never", rng=FirstChoice())

    def add(
        self,
        name: str,
        role: pb.WorkerRole.ValueType = DECODE,
        *,
        model: str = "m",
        num_blocks: int = 100,
        kv_address: str = KV_ADDRESS,
        **load: Any,
    ) -> None:
        card = pb.ModelCard(model_id=model, context_length=4096)
        info = pb.WorkerInfo(
            worker_id=name, incarnation=f"{name}-1", role=role, card=card, host_id="h", kv_address=kv_address
        )
        pool = pb.KvPool(num_total_blocks=num_blocks, num_free_blocks=num_blocks, tokens_per_block=16)
        self.registry.register(info, pb.LoadReport(**{"state": READY, "kv": pool, **load}))

    def add_kv(self, address: str = KV_ADDRESS) -> None:
        info = pb.WorkerInfo(worker_id="kv", incarnation="kv-1", role=pb.WORKER_ROLE_KV, address=address, host_id="h")
        self.registry.register(info, pb.LoadReport(state=READY))


def test_a_burst_is_spread_before_any_worker_has_reported_it() -> None:
    harness = Harness()
    harness.add_kv()
    for name in "ab":
        harness.add(f"d{name}")
        harness.add(f"p{name}", PREFILL)
    chosen: Counter[str] = Counter()
    for _ in range(20):
        route = harness.router.choose(RoutingRequest("m", 30, 10))
        assert route.prefill is not None
        harness.router.in_flight.decode_tokens[route.decodes[0].incarnation] += 40
        harness.router.in_flight.prefill_tokens[route.prefill.incarnation] += 30
        chosen.update([route.decodes[0].worker_id, route.prefill.worker_id])
    assert chosen == {"da": 10, "db": 10, "pa": 10, "pb": 10}


def test_a_faster_prefill_worker_gets_more() -> None:
    harness = Harness()
    harness.add_kv()
    harness.add("d")
    harness.add("slow", PREFILL, counters={"prompt_tokens_computed": 1e11, "step_seconds": 1e9})
    harness.add("fast", PREFILL, counters={"prompt_tokens_computed": 1e12, "step_seconds": 1e9})
    harness.router.in_flight.prefill_tokens["fast-1"] = 500
    route = harness.router.choose(RoutingRequest("m", 100, 10))
    assert route.prefill is not None and route.prefill.worker_id == "fast"
    assert route.predicted_ms["prefill"] == pytest.approx(600.0)


@pytest.mark.parametrize("state", [pb.WORKER_STATE_LOADING, pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_FAILED])
def test_workers_that_are_not_ready_get_nothing(state: pb.WorkerState.ValueType) -> None:
    harness = Harness()
    harness.add("a", state=state)
    harness.add("b")
    assert [worker.worker_id for worker in harness.router.choose(RoutingRequest("m", 10, 10)).decodes] == ["b"]


def test_suspected_workers_get_nothing() -> None:
    harness = Harness()
    harness.add("a")
    for _ in range(13):
        harness.now += 0.25
        harness.registry.sweep()
    harness.add("b")
    assert [worker.worker_id for worker in harness.router.choose(RoutingRequest("m", 10, 10)).decodes] == ["b"]


def test_workers_of_another_model_get_nothing() -> None:
    harness = Harness()
    harness.add("a", model="other")
    harness.add("b")
    assert [worker.worker_id for worker in harness.router.choose(RoutingRequest("m", 10, 10)).decodes] == ["b"]


def test_an_unknown_model_is_not_found_and_a_known_one_is_not_ready() -> None:
    harness = Harness()
    with pytest.raises(ModelNotFound, match="nothing yet"):
        harness.router.choose(RoutingRequest("m", 10, 10))
    harness.add("a", state=pb.WORKER_STATE_DRAINING)
    with pytest.raises(Unavailable):
        harness.router.choose(RoutingRequest("m", 10, 10))
    with pytest.raises(ModelNotFound, match="served here: m"):
        harness.router.choose(RoutingRequest("x", 10, 10))


def test_when_all_have_refused_it_is_overload() -> None:
    harness = Harness()
    harness.add("a")
    with pytest.raises(Overloaded) as refused:
        harness.router.choose(RoutingRequest("m", 10, 10), avoid={"a-1"})
    assert refused.value.http_status == 429


def test_the_worker_whose_pool_seems_to_have_room_comes_first() -> None:
    harness = Harness()
    tight = pb.KvPool(num_total_blocks=1000, num_free_blocks=1, tokens_per_block=16)
    harness.add("a", kv=tight)
    harness.add("b", num_tokens_in_flight=800)
    assert [worker.worker_id for worker in harness.router.choose(RoutingRequest("m", 100, 10)).decodes] == ["b", "a"]


def test_a_pool_that_could_never_hold_a_request_is_not_asked() -> None:
    harness = Harness()
    harness.add("small", num_blocks=2)
    harness.add("large", num_blocks=20)
    assert [worker.worker_id for worker in harness.router.choose(RoutingRequest("m", 100, 10)).decodes] == ["large"]
    assert len(harness.router.choose(RoutingRequest("m", 32, 1)).decodes) == 2
    with pytest.raises(ContextTooLong, match="lower max_tokens"):
        harness.router.choose(RoutingRequest("m", 300, 50))


def test_choices_that_fit_no_pools_at_once_are_not_handed_over() -> None:
    """A hand-over begins when all choices have their blocks; those of one worker's own prompts wait in its queue."""
    harness = Harness()
    harness.add_kv()
    harness.add("p", PREFILL, kv_address=KV_ADDRESS)
    harness.add("a", kv_address=KV_ADDRESS, num_blocks=20)
    harness.add("b", kv_address=KV_ADDRESS, num_blocks=10)
    prompt = RoutingRequest("m", 16 * 4, 10)  # with its first token and a block to grow into, 6 blocks a choice
    routes = [harness.router.choose(replace(prompt, num_choices=number)) for number in (1, 4, 5)]
    assert [route.prefill is not None for route in routes] == [True, True, False]
    assert routes[2].reason.startswith("decode computes the prompt")


@pytest.mark.parametrize("why", ["no KV service", "prefill is not connected to it", "decode has none"])
def test_decode_computes_the_prompt_where_no_cache_could_be_passed(why: str) -> None:
    harness = Harness()
    if why != "no KV service":
        harness.add_kv()
    harness.add("p", PREFILL, kv_address="" if why == "prefill is not connected to it" else KV_ADDRESS)
    harness.add("d", kv_address="" if why == "decode has none" else KV_ADDRESS)
    route = harness.router.choose(RoutingRequest("m", 10, 10))
    assert route.prefill is None
    assert route.reason == "no KV service: decode computes the prompt"


def test_a_kv_service_that_comes_or_goes_and_a_worker_that_leaves_it_count_at_once() -> None:
    harness = Harness()
    harness.add("p", PREFILL)
    harness.add("d")

    def is_handed_over() -> bool:
        return harness.router.choose(RoutingRequest("m", 10, 10)).prefill is not None

    def beat(kv_address: str) -> None:
        load = pb.LoadReport(state=READY)
        beat = cp.HeartbeatRequest(worker_id="p", incarnation="p-1", load=load, kv_address=kv_address)
        assert harness.registry.heartbeat(beat)

    assert not is_handed_over()
    harness.add_kv()
    assert is_handed_over()
    beat("")
    assert not is_handed_over()
    beat(KV_ADDRESS)
    assert is_handed_over()
    harness.registry.deregister("kv", "kv-1")
    assert not is_handed_over()


def test_a_session_returns_to_its_workers_unless_they_are_much_busier() -> None:
    harness = Harness()
    harness.add_kv()
    for name in "ab":
        harness.add(f"d{name}")
        harness.add(f"p{name}", PREFILL)
    harness.router.affinity.remember("mine", SessionRoute("pb-1", "db-1"))
    in_flight = harness.router.in_flight
    in_flight.decode_tokens.update({"da-1": 100, "db-1": 120})
    in_flight.prefill_tokens.update({"pa-1": 100, "pb-1": 120})

    def places(session_id: str) -> tuple[str, str]:
        route = harness.router.choose(RoutingRequest("m", 10, 10, session_id=session_id))
        assert route.prefill is not None
        return route.prefill.worker_id, route.decodes[0].worker_id

    assert places("mine") == ("pb", "db")
    assert places("") == ("pa", "da")
    in_flight.decode_tokens["db-1"] = in_flight.prefill_tokens["pb-1"] = 140
    assert places("mine") == ("pa", "da")
