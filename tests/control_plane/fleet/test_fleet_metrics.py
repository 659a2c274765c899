"""The gateway exports how many workers and models there are, and nothing of a single worker."""

from __future__ import annotations

from typing import Any

from opentelemetry.metrics import CallbackOptions

from control_plane.fleet.attached import Attached
from control_plane.fleet.fleet_metrics import FORGET_SECONDS, FleetCounts, HealthCounts
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from tandem.v1 import types_pb2 as pb

OPTIONS = CallbackOptions()


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.counts = FleetCounts(self.registry, lambda: self.now)

    def pass_time(self, seconds: float) -> None:
        """Sweep twice a second, as a gateway does: after a longer pause nobody would be suspected."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.registry.sweep()

    def register(self, name: str, role: pb.WorkerRole.ValueType, model: str, state: pb.WorkerState.ValueType) -> None:
        card = pb.ModelCard(model_id=model, context_length=512, block_size=16)
        info = pb.WorkerInfo(worker_id=name, incarnation=name, role=role, address="127.0.0.1:1", host_id="h", card=card)
        self.registry.register(info, pb.LoadReport(state=state))

    def workers(self) -> dict[tuple[Any, Any], float]:
        return {
            ((seen.attributes or {})["role"], (seen.attributes or {})["state"]): seen.value
            for seen in self.counts.workers(OPTIONS)
        }

    def ready(self) -> dict[Any, float]:
        return {(seen.attributes or {})["model"]: seen.value for seen in self.counts.readiness(OPTIONS)}

    def models(self) -> dict[Any, float]:
        return {(seen.attributes or {})["state"]: seen.value for seen in self.counts.models(OPTIONS)}


def test_workers_are_counted_by_role_and_state_and_models_by_readiness() -> None:
    world = World()
    world.register("d1", pb.WORKER_ROLE_DECODE, "a", pb.WORKER_STATE_READY)
    world.register("d2", pb.WORKER_ROLE_DECODE, "a", pb.WORKER_STATE_DRAINING)
    world.register("d3", pb.WORKER_ROLE_DECODE, "b", pb.WORKER_STATE_LOADING)
    world.register("p1", pb.WORKER_ROLE_PREFILL, "c", pb.WORKER_STATE_READY)
    world.register("e1", pb.WORKER_ROLE_ENCODE, "d", pb.WORKER_STATE_READY)
    assert world.workers() == {
        ("decode", "ready"): 1,
        ("decode", "draining"): 1,
        ("decode", "loading"): 1,
        ("prefill", "ready"): 1,
        ("encode", "ready"): 1,
    }
    assert world.ready() == {"a": 1, "b": 0, "c": 0, "d": 1}, "a prefill worker alone cannot answer"
    assert world.models() == {"ready": 2, "unready": 2}


def test_a_silent_worker_is_suspected_then_gone_and_its_model_is_unready_for_an_hour() -> None:
    world = World()
    world.register("d1", pb.WORKER_ROLE_DECODE, "a", pb.WORKER_STATE_READY)
    assert world.ready() == {"a": 1}
    world.pass_time(4.0)
    assert (world.workers(), world.ready()) == ({("decode", "suspected"): 1}, {"a": 0})
    world.pass_time(2.0)
    assert (world.workers(), world.models()) == ({}, {"ready": 0, "unready": 1})
    world.now += FORGET_SECONDS
    assert world.models() == {"ready": 0, "unready": 0}


def test_sick_workers_and_ejections_are_counted_and_no_worker_has_a_series() -> None:
    world = World()
    for name in ("d1", "d2", "d3"):
        world.register(name, pb.WORKER_ROLE_DECODE, "a", pb.WORKER_STATE_READY)
    world.register("k1", pb.WORKER_ROLE_KV, "", pb.WORKER_STATE_READY)
    health = WorkerHealth(world.registry, lambda: world.now)
    health.ask_links(Attached({"d1", "d2"}))
    sick = world.registry.get("d1")
    assert sick is not None
    for _ in range(3):
        health.watch(sick, 0.1).failed("broken")
    counts = HealthCounts(world.registry, health)
    found = {tuple((seen.attributes or {}).values()): seen.value for seen in counts.workers(OPTIONS) if seen.value}
    assert found == {("decode", "ok"): 1, ("decode", "ejected"): 1, ("decode", "detached"): 1}
    [ejections] = counts.ejections(OPTIONS)
    assert (ejections.attributes, ejections.value) == ({"role": "decode", "cause": "failed"}, 1)
