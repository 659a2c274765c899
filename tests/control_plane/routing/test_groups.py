"""A model's workers that share KV blocks are a group: pairs are within one, and groups get work by capacity."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.groups import index_space
from control_plane.routing.router import Route, Router
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded, Unavailable
from tandem_runtime.kv.spaces import model_identity

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
KV_ADDRESS = "h:1"
BLOCK = 16
CHAIN = [bytes([index]) * 16 for index in range(60)]
PROMPT = RoutingRequest("m", 60 * BLOCK + 1, 16, CHAIN, BLOCK)
UNCACHED = RoutingRequest("m", 61 * BLOCK, 16)
OLD, NEW = "class-old", "class-new"


class Fleet:
    """Workers of classes, at 1,000 prompt tokens per second, with pools of 16,000 tokens."""

    def __init__(self, seed: int = 7) -> None:
        self.registry = WorkerRegistry(3.0, 5.0)
        self.router = Router(self.registry, "never", rng=random.Random(seed))
        info = pb.WorkerInfo(worker_id="kv", incarnation="kv", role=pb.WORKER_ROLE_KV, address=KV_ADDRESS, host_id="h")
        store = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1))
        self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=store))

    def add(
        self,
        name: str,
        role: pb.WorkerRole.ValueType,
        numerics_class: str = OLD,
        *,
        num_blocks: int = 1000,
        weights: str = "w",
        load: dict[str, Any] | None = None,
        **card: Any,
    ) -> None:
        fields: dict[str, Any] = {"takes_spaces": True, "block_size": BLOCK, "context_length": 4096, **card}
        fingerprint = pb.Fingerprint(
            digest=numerics_class.encode(), numerics_class=numerics_class, weights_digest=weights
        )
        model = pb.ModelCard(model_id="m", fingerprint=fingerprint, **fields)
        info = pb.WorkerInfo(
            worker_id=name, incarnation=name, role=role, card=model, host_id="h", kv_address=KV_ADDRESS
        )
        pool = pb.KvPool(num_total_blocks=num_blocks, num_free_blocks=num_blocks, tokens_per_block=BLOCK)
        counters = {"prompt_tokens_computed": 1000.0, "step_seconds": 1.0, "steps": 100.0}
        report = {"state": pb.WORKER_STATE_READY, "kv": pool, "counters": counters, **(load or {})}
        self.registry.register(info, pb.LoadReport(**report))

    def pair(self, numerics_class: str, suffix: str, **fields: Any) -> None:
        self.add(f"p-{suffix}", PREFILL, numerics_class, **fields)
        self.add(f"d-{suffix}", DECODE, numerics_class, **fields)

    def worker(self, name: str) -> Worker:
        worker = self.registry.get(name)
        assert worker is not None
        return worker

    def learn(self, name: str, num_blocks: int, host: str = "") -> None:
        worker = self.registry.get(name)
        assert worker is not None
        self.router.prefixes.learn(CHAIN[:num_blocks], name, host, space=index_space(worker))

    def draws(self, number: int, request: RoutingRequest = PROMPT) -> Counter[str]:
        return Counter(self.router.choose(request).decode_id for _ in range(number))


def two_classes(**new: Any) -> Fleet:
    fleet = Fleet()
    fleet.pair(OLD, "old")
    fleet.pair(NEW, "new", **new)
    return fleet


def names(route: Route) -> tuple[str, ...]:
    return tuple(worker.worker_id for worker in route.workers)


def test_a_prompt_is_handed_over_within_one_group_only() -> None:
    fleet = two_classes()
    assert {names(fleet.router.choose(PROMPT)) for _ in range(50)} == {("p-old", "d-old"), ("p-new", "d-new")}
    assert "in one of 2 groups that share KV blocks" in fleet.router.choose(PROMPT).reason


def test_groups_get_work_in_proportion_to_what_is_free() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.pair(OLD, f"old-{number}")
    fleet.pair(NEW, "new")
    num_new = fleet.draws(10_000, UNCACHED)["d-new"]
    assert 2_350 <= num_new <= 2_650, "a quarter"
    fleet.router.in_flight.add("d-new", num_decode_tokens=8_000)  # half of its pool: 8,000 of 56,000 tokens are free
    assert 100 <= fleet.draws(1_000, UNCACHED)["d-new"] <= 190


def test_the_scarcer_half_of_a_group_is_its_capacity() -> None:
    fleet = two_classes()
    for number in range(3):
        fleet.add(f"d-old-{number}", DECODE)  # four of five pools, but half of the prefill speed
    assert 240 <= fleet.draws(1_000, UNCACHED)["d-new"] <= 330, "min(1/2, 1/5) against min(1/2, 4/5): 2/7"


@pytest.mark.parametrize("exactness", ["class", "layout"])
def test_a_group_whose_engine_is_slow_gets_as_many_answers_at_once_as_the_other(exactness: str) -> None:
    """Answers end in proportion to the speeds; each that ends is followed by another."""
    fleet, speeds, chance = Fleet(), {"d-old": 4_000.0, "d-new": 1_000.0}, random.Random(3)
    rates = {"d-old": 500, "d-new": 1_000}  # the one that reads prompts faster is not the one that answers faster
    for name, numerics_class in (("d-old", OLD), ("d-new", NEW)):
        counters = {"tokens_generated": speeds[name], "step_seconds": 1.0, "steps": 100.0}
        fleet.add(name, DECODE, numerics_class, load={"counters": counters}, exactness=exactness)
        fleet.router.costs.prompt_read(
            fleet.worker(name), pb.PhaseLedger(scheduled_ns=1, first_token_ns=10**9, num_computed_tokens=rates[name])
        )
    spaces = {worker.space for worker in fleet.registry.workers(DECODE)}
    assert len(spaces) == (1 if exactness == "layout" else 2), "classes of one space are groups, too"
    add, seen = fleet.router.in_flight.add, Counter[str]()
    answers = {name: [add(name, num_answers=1) for _ in range(8)] for name in speeds}
    for _ in range(5_000):
        busy = [name for name in speeds if answers[name]]
        (ended,) = chance.choices(busy, [speeds[name] for name in busy])
        answers[ended].pop().remove()
        chosen = fleet.router.choose(UNCACHED).decode_id
        answers[chosen].append(add(chosen, num_answers=1))
        seen.update({name: len(of_worker) for name, of_worker in answers.items()})
    assert 0.4 <= seen["d-new"] / seen.total() <= 0.6, "half of the answers; by pools alone it would be nearly all"


def test_a_group_whose_speed_is_not_known_yet_counts_as_the_others() -> None:
    fleet = Fleet()
    fleet.add("d-old", DECODE, load={"counters": {"tokens_generated": 5_000.0, "step_seconds": 1.0, "steps": 9.0}})
    fleet.add("d-new", DECODE, NEW, load={"counters": {}})
    assert 400 <= fleet.draws(1_000, UNCACHED)["d-new"] <= 600


def test_a_group_without_prefill_counts_by_its_pools_and_computes_prompts_itself() -> None:
    fleet = Fleet()
    fleet.router = Router(fleet.registry, "auto", rng=random.Random(1))
    fleet.pair(OLD, "old")
    fleet.add("d-new", DECODE, NEW)
    routes = [fleet.router.choose(PROMPT) for _ in range(200)]
    assert {names(route) for route in routes} == {("p-old", "d-old"), ("d-new",)}
    assert 60 <= sum(route.prefill is None for route in routes) <= 140


def test_where_prefill_must_compute_prompts_a_group_without_it_is_the_last_resort() -> None:
    fleet = Fleet()
    fleet.pair(OLD, "old")
    fleet.add("d-new", DECODE, NEW)
    assert {names(fleet.router.choose(PROMPT)) for _ in range(50)} == {("p-old", "d-old")}
    assert names(fleet.router.choose(PROMPT, {"d-old"})) == ("d-new",)


def test_once_all_of_a_group_have_refused_the_next_group_is_asked() -> None:
    fleet = two_classes()
    fleet.add("d-old-2", DECODE)
    for _ in range(20):
        assert names(fleet.router.choose(PROMPT, {"d-old", "d-old-2"})) == ("p-new", "d-new")
    with pytest.raises(Overloaded):
        fleet.router.choose(PROMPT, {"d-old", "d-old-2", "d-new"})


def test_a_group_whose_pools_are_full_is_not_drawn_while_another_has_room() -> None:
    full = pb.KvPool(num_total_blocks=1000, num_free_blocks=0, tokens_per_block=BLOCK)
    fleet = two_classes(load={"kv": full})
    assert fleet.draws(50) == {"d-old": 50}


def test_a_known_prefix_prefers_its_group_unless_the_queue_there_costs_more() -> None:
    fleet = two_classes()
    fleet.learn("p-new", 30)
    assert fleet.draws(50) == {"d-new": 50}
    fleet.router.in_flight.prefill_tokens["p-new"] = 600
    assert fleet.draws(50)["d-old"] > 20


def test_blocks_of_another_space_are_never_expected() -> None:
    fleet = two_classes()
    fleet.learn("p-old", 30, "h")
    route = fleet.router.choose(PROMPT, {"d-old"})
    assert names(route) == ("p-new", "d-new")
    assert (route.describe()["cached_own_tokens"], route.describe()["cached_host_tokens"]) == (0, 0)


def test_workers_of_one_family_of_layouts_share_blocks_if_the_model_is_exact_by_layout_only() -> None:
    group = pb.KvGroup(layers=[0], num_kv_heads=1, k_head_size=4, v_head_size=4)
    fleet = Fleet()
    for name, role, dtype, tokens in (("p", PREFILL, "float32", 16), ("d", DECODE, "bfloat16", 32)):
        layout = pb.KvLayout(groups=[pb.KvGroup(dtype=dtype, tokens_per_block=tokens)])
        layout.groups[0].MergeFrom(group)
        fleet.add(name, role, f"class-{name}", layout=layout, exactness="layout", block_size=tokens)
    fleet.learn("p", 30, "h")
    assert names(fleet.router.choose(PROMPT)) == ("p", "d")
    assert fleet.router.choose(PROMPT).describe()["cached_own_tokens"] == 30 * BLOCK


def test_a_session_stays_in_its_group_unless_that_is_much_busier() -> None:
    fleet = two_classes()
    fleet.router.affinity.remember("s", SessionRoute("p-new", "d-new"))
    in_flight = fleet.router.in_flight.decode_tokens
    in_flight.update({"d-old": 1000, "d-new": 1200})
    asked = replace(PROMPT, session_id="s")
    assert fleet.draws(50, asked) == {"d-new": 50}
    in_flight["d-new"] = 1500
    assert fleet.draws(50, asked)["d-old"] > 10


def test_a_session_that_another_gateway_has_moved_to_another_group_is_not_kept() -> None:
    fleet = two_classes()
    fleet.router.affinity.remember("s", SessionRoute("p-new", "d-new"))
    asked = replace(PROMPT, session_id="s")
    assert fleet.draws(20, asked) == {"d-new": 20}
    fleet.learn("d-old", 30, "")
    assert fleet.draws(50, asked)["d-old"] > 10


def test_an_answer_that_moves_prefers_its_class_and_else_takes_any() -> None:
    fleet = two_classes()
    fleet.add("d-old-2", DECODE)
    moved = replace(PROMPT, hand_over="never", preferred_class=OLD)
    assert fleet.router.choose(moved, {"d-old"}).decode_id == "d-old-2"
    assert fleet.router.choose(moved, {"d-old", "d-old-2"}).decode_id == "d-new"


def test_in_a_group_of_two_classes_an_answer_that_moves_prefers_its_own() -> None:
    fleet = Fleet()
    for name, numerics_class in (("a", OLD), ("b", NEW), ("c", NEW)):
        fleet.add(name, DECODE, numerics_class, exactness="layout")
    moved = replace(PROMPT, hand_over="never", preferred_class=NEW)
    assert {names(fleet.router.choose(moved, {"c"})) for _ in range(10)} == {("b",)}
    assert names(fleet.router.choose(moved, {"b", "c"})) == ("a",)


def test_a_choice_that_waits_for_blocks_prefers_workers_that_can_read_them() -> None:
    fleet = two_classes()
    writer = fleet.registry.get("p-new")
    assert writer is not None
    waits = replace(PROMPT, hand_over="always", preferred_space=writer.space)
    assert fleet.draws(20, waits) == {"d-new": 20}
    assert fleet.router.choose(waits, {"d-new"}).decode_id == "d-old"


def test_a_prompt_goes_to_workers_of_the_model_that_it_was_tokenized_for() -> None:
    fleet = Fleet()
    fleet.add("d", DECODE, weights="new weights")
    old, new = (model_identity(pb.Fingerprint(weights_digest=weights)) for weights in ("w", "new weights"))
    assert fleet.router.choose(replace(PROMPT, identity=new)).decode_id == "d"
    with pytest.raises(Unavailable):
        fleet.router.choose(replace(PROMPT, identity=old))


def test_workers_of_release_0_2_exchange_blocks_with_newer_ones_of_their_class_but_share_no_keys() -> None:
    fleet = Fleet()
    fleet.add("p", PREFILL)
    fleet.add("d", DECODE, takes_spaces=False)
    fleet.learn("p", 30, "h")
    route = fleet.router.choose(PROMPT)
    assert names(route) == ("p", "d") and route.describe()["cached_own_tokens"] == 480
    old, new = fleet.registry.get("d"), fleet.registry.get("p")
    assert old is not None and new is not None and old.space == new.space and index_space(old) != index_space(new)


def test_of_workers_that_are_about_as_good_each_gets_some() -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.add(f"d{name}", DECODE)
    fleet.add("pa", PREFILL)
    fleet.add("pb", PREFILL)
    chosen = Counter(name for _ in range(300) for name in names(fleet.router.choose(UNCACHED))[:2])
    assert all(70 <= chosen[f"d{name}"] <= 130 for name in "abc") and all(chosen[f"p{name}"] >= 120 for name in "ab")
    found = fleet.router.choose(UNCACHED).explained()
    assert found.runner_up is not None and found.runner_up.worker not in (found.prefill, "")
    # Seven percent more work, and a worker is none of the best any more.
    fleet.router.in_flight.prefill_tokens["pb"] = 70
    assert {names(fleet.router.choose(UNCACHED))[0] for _ in range(50)} == {"pa"}


def test_the_same_seed_draws_the_same_routes() -> None:
    def routes(seed: int) -> list[tuple[str, ...]]:
        fleet = Fleet(seed)
        fleet.pair(OLD, "old")
        fleet.pair(NEW, "new")
        return [names(fleet.router.choose(PROMPT)) for _ in range(20)]

    assert routes(1) == routes(1) != routes(2)
