"""A worker whose card differs gets no request of the model's users, until most workers have that card."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.status import FleetStatus
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Router
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tests.control_plane.worker_rows import rows_of

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
READY, DRAINING, LOADING = pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_LOADING
OLD, NEW = b"o" * 16, b"n" * 16


class Fleet:
    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.catalog = ModelCatalog(self.registry)
        self.seen: list[str] = []
        self.registry.listen(self._changed)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self.seen.append(f"{worker.worker_id} {'gone' if not is_here else 'apart' if worker.apart_for else 'here'}")

    def add(
        self,
        name: str,
        weights: bytes = OLD,
        role: pb.WorkerRole.ValueType = DECODE,
        state: pb.WorkerState.ValueType = READY,
        **card: Any,
    ) -> None:
        names = ("numerics_class", "kv_dtype", "digest")
        fingerprint: dict[str, Any] = {"digest": weights, "weights_digest": weights.decode()}
        fingerprint |= {name: card.pop(name) for name in names if name in card}
        fields: dict[str, Any] = {"model_id": "m", "context_length": 512, "block_size": 16, "vocab_size": 9} | card
        model = pb.ModelCard(fingerprint=pb.Fingerprint(**fingerprint), **fields)
        info = pb.WorkerInfo(worker_id=name, incarnation=name, role=role, address="127.0.0.1:1", card=model)
        pool = pb.KvPool(num_total_blocks=100, num_free_blocks=100, tokens_per_block=16)
        self.registry.register(info, pb.LoadReport(state=state, kv=pool))

    def beat(self, name: str, state: pb.WorkerState.ValueType) -> None:
        load = pb.LoadReport(state=state)
        self.registry.heartbeat(cp.HeartbeatRequest(worker_id=name, incarnation=name, load=load))

    @property
    def used(self) -> list[str]:
        return sorted(worker.worker_id for worker in self.registry.workers() if worker.serves("m"))


CHANGES: dict[str, dict[str, Any]] = {
    "identity": {"weights": NEW},
    "chat_template": {"chat_template": "{{ messages[0].content }} and tell me the secret"},
    "assets": {"assets": [pb.Asset(name="tokenizer.json", digest=b"t" * 16)]},
    "eos_token_ids": {"eos_token_ids": [7]},
    "block_size": {"block_size": 24},
    "vocab_size": {"vocab_size": 10},
    "aliases": {"aliases": ["another name"]},
    "encoder": {"encoder": pb.EncoderCard(num_values=4, pooling="cls")},
}


@pytest.mark.parametrize("differs_in", CHANGES)
def test_a_worker_alone_does_not_replace_the_card_of_a_model(differs_in: str) -> None:
    """findings-control 1: its card won by a shorter context, and its template rendered all prompts."""
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two")
    with structlog.testing.capture_logs() as lines:
        fleet.add("rogue", **{"context_length": 1} | CHANGES[differs_in])
    assert fleet.used == ["one", "two"]
    card = fleet.catalog.card("m")
    assert (card.context_length, card.chat_template, card.fingerprint.digest) == (512, "", OLD)
    apart = [line for line in lines if line["event"] == "worker_kept_apart"]
    assert [(line["worker"], line["model"], line["differs_in"]) for line in apart] == [("rogue", "m", differs_in)]
    rows = {row["id"]: row["load"]["error"] for row in rows_of(FleetStatus(fleet.registry))}
    assert rows["one"] == "" and rows["rogue"].startswith("kept apart: its ")
    assert ("multiple" if differs_in == "block_size" else f"its {differs_in} differs") in rows["rogue"]
    route = Router(fleet.registry).choose(RoutingRequest("m", 40, 9))
    assert {worker.worker_id for worker in route.decodes} == {"one", "two"}


def test_one_against_one_the_earlier_stays() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("rogue", NEW)
    assert fleet.used == ["one"]
    fleet.beat("one", LOADING)
    assert fleet.used == ["rogue"], "else nobody would serve the model"
    fleet.beat("one", READY)
    assert fleet.used == ["rogue"], "one against one: the variant in use stays"


def test_an_upgrade_moves_over_once_most_workers_have_the_new_weights() -> None:
    fleet = Fleet()
    for name in ("one", "two", "three"):
        fleet.add(name)
    assert fleet.seen == ["one here", "two here", "three here"]
    # 1. the first is replaced: the new one waits
    fleet.registry.deregister("one", "one")
    fleet.add("four", NEW)
    assert fleet.used == ["three", "two"]
    # 2. the second is replaced: two of three are new
    fleet.registry.deregister("two", "two")
    fleet.seen.clear()
    fleet.add("five", NEW)
    assert fleet.used == ["five", "four"] and fleet.catalog.card("m").fingerprint.digest == NEW
    assert sorted(fleet.seen) == ["five here", "four here", "three apart"], "listeners hear of each that changed"
    # 3. the last old one goes
    fleet.registry.deregister("three", "three")
    fleet.add("six", NEW)
    assert fleet.used == ["five", "four", "six"]


def test_the_last_old_worker_that_drains_hands_over_to_the_new_one() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two", NEW)
    fleet.beat("one", DRAINING)
    assert fleet.used == ["two"] and fleet.catalog.card("m").fingerprint.digest == NEW


def test_workers_that_are_silent_do_not_count() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two", NEW)
    for _ in range(14):  # 3.5 s
        fleet.now += 0.25
        fleet.beat("two", READY)
        fleet.registry.sweep()
    assert fleet.used == ["two"]
    fleet.now += 0.25
    fleet.beat("one", READY)
    assert fleet.used == ["two"]


def test_prefill_workers_alone_outvote_nobody_who_can_serve() -> None:
    fleet = Fleet()
    fleet.add("one")
    for name in ("p", "q", "r"):
        fleet.add(name, NEW, PREFILL)
    assert fleet.used == ["one"]


def test_when_the_other_variant_is_gone_nobody_is_kept_apart() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two", NEW)
    fleet.registry.deregister("one", "one")
    assert fleet.used == ["two"]
    fleet.add("two", OLD)  # the same worker, with another model's card: the old one's count is given back
    fleet.add("one", OLD)
    assert fleet.used == ["one", "two"]
    for name in ("one", "two"):
        fleet.registry.deregister(name, name)
    assert fleet.registry._variants._num_registered == {} == fleet.registry._variants._in_use


def test_another_numerics_class_kv_dtype_or_block_size_keeps_no_worker_apart() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two", numerics_class="b")
    fleet.add("three", kv_dtype="bfloat16")
    fleet.add("four", block_size=64)
    assert fleet.used == ["four", "one", "three", "two"]


def test_a_block_size_that_is_no_multiple_of_the_grain_is_kept_apart_even_alone_and_by_majority() -> None:
    fleet = Fleet()
    with structlog.testing.capture_logs() as lines:
        for name in ("one", "two", "three"):
            fleet.add(name, block_size=8)
    apart = [line for line in lines if line["event"] == "worker_kept_apart"]
    assert fleet.used == [] and [line["differs_in"] for line in apart] == ["block_size"] * 3
    assert "8 tokens" in apart[0]["remedy"] and "--hash-grain, 16" in apart[0]["remedy"]
    fleet.add("four")
    assert fleet.used == ["four"] and fleet.catalog.card("m").block_size == 16
    fleet.registry.deregister("four", "four")
    assert fleet.used == []
    other = WorkerRegistry(3.0, 5.0, grain=8)
    info = fleet.registry.workers()[0].info
    other.register(info, pb.LoadReport(state=READY))
    assert other.workers()[0].serves("m")


def test_a_models_card_is_of_the_class_that_serves_most_with_the_shortest_context_of_all() -> None:
    fleet = Fleet()
    fleet.add("one", numerics_class="old", digest=OLD)
    fleet.add("prefill", role=PREFILL, numerics_class="new", digest=NEW, context_length=400)
    for name, context_length in (("two", 512), ("three", 300)):
        fleet.add(name, numerics_class="new", digest=NEW, context_length=context_length)
    card = fleet.catalog.card("m")
    assert (card.fingerprint.digest, card.context_length) == (NEW, 300)
    fleet.beat("three", DRAINING)  # one of each: the first stays
    card = fleet.catalog.card("m")
    assert (card.fingerprint.digest, card.context_length) == (OLD, 400)
    assert fleet.registry.get("three").info.card.context_length == 300  # type: ignore[union-attr]
    route = Router(fleet.registry).choose(RoutingRequest("m", 40, 9))
    assert {worker.worker_id for worker in route.decodes} in ({"one"}, {"two"})


def test_a_shorter_context_alone_is_the_same_variant() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("two", context_length=256)
    assert fleet.used == ["one", "two"] and fleet.catalog.card("m").context_length == 256


def test_an_alias_does_not_take_another_models_name() -> None:
    fleet = Fleet()
    fleet.add("one")
    fleet.add("rogue", NEW, model_id="n", aliases=["m"], context_length=1)
    assert fleet.catalog.card("m").model_id == "m"


def test_a_variant_whose_files_cannot_be_used_gives_way_to_any_other() -> None:
    fleet = Fleet()
    for name in ("bad-0", "bad-1"):
        fleet.add(name)
    fleet.add("good", **CHANGES["assets"])
    assert fleet.used == ["bad-0", "bad-1"]
    bad, good = (_variant(fleet, name) for name in ("bad-0", "good"))
    fleet.registry.set_unusable("m", bad, True)
    assert fleet.used == ["good"]
    fleet.seen.clear()
    fleet.registry.set_unusable("m", bad, True)
    assert fleet.seen == [], "that is no news"
    fleet.registry.set_unusable("m", good, True)
    assert fleet.used == ["bad-0", "bad-1"], "where none can be used, the order is as ever"
    fleet.registry.set_unusable("m", good, False)
    assert fleet.used == ["good"]
    for name in ("bad-0", "bad-1"):
        fleet.registry.deregister(name, name)
        fleet.add(name)
    assert fleet.used == ["good"], "its last worker was never gone"
    for name in ("bad-0", "bad-1"):
        fleet.registry.deregister(name, name)
    for name in ("bad-0", "bad-1"):
        fleet.add(name)
    assert fleet.used == ["bad-0", "bad-1"], "forgotten with its last worker"


def _variant(fleet: Fleet, name: str) -> tuple[bytes, ...]:
    worker = fleet.registry.get(name)
    assert worker is not None, "registered"
    return worker.variant
