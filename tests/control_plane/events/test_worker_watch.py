"""Tests that each change of a worker is told once, and that a model without workers is told."""

from __future__ import annotations

from typing import Any

from control_plane.events.worker_names import WorkerNames
from control_plane.events.worker_watch import WorkerWatch
from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb

READY = pb.WORKER_STATE_READY


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.names = WorkerNames(self.registry)
        self.watch = WorkerWatch(self.registry, lambda kind, **values: self.events.append((kind, values)))

    def register(self, worker_id: str = "w", incarnation: str = "1", *, load: pb.LoadReport | None = None) -> None:
        info = pb.WorkerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            role=pb.WORKER_ROLE_DECODE,
            address="127.0.0.1:1",
            host_id="h",
            card=pb.ModelCard(model_id="m", context_length=512, block_size=16),
            settings={"worker_id": f"name of {worker_id}"},
        )
        self.registry.register(info, load or pb.LoadReport(state=READY))

    def beat(self, worker_id: str = "w", incarnation: str = "1", **load: Any) -> None:
        report = pb.LoadReport(**{"state": READY, **load})
        self.registry.heartbeat(cp.HeartbeatRequest(worker_id=worker_id, incarnation=incarnation, load=report))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.registry.sweep()

    def told(self) -> list[str]:
        kinds = [kind for kind, _ in self.events]
        self.events.clear()
        return kinds


def test_each_change_of_a_worker_is_told_once() -> None:
    world = World()
    world.register()
    world.beat()
    assert world.told() == ["worker_joined", "worker_ready"]
    world.beat(state=pb.WORKER_STATE_DRAINING)
    world.beat(state=pb.WORKER_STATE_DRAINING)
    assert world.told() == ["worker_draining", "model_unready"]
    world.beat()
    world.beat(state=pb.WORKER_STATE_FAILED, error="no memory")
    assert world.told() == ["worker_ready", "worker_failed", "model_unready"]


def test_a_silent_worker_is_suspected_then_lost_and_a_stopped_one_has_left() -> None:
    world = World()
    world.register()
    world.told()
    world.pass_time(3.5)
    assert world.told() == ["worker_suspected", "model_unready"]
    world.beat()
    assert world.told() == ["worker_ready"]
    world.pass_time(6.0)
    assert world.told() == ["worker_suspected", "model_unready", "worker_lost"]
    world.register("v")
    world.registry.deregister("v", "1")
    assert world.told() == ["worker_joined", "worker_ready", "worker_left", "model_unready"]


def test_a_worker_that_is_started_again_after_a_crash_was_lost() -> None:
    world = World()
    world.register()
    world.told()
    world.register(incarnation="2")
    assert [values["cause"] for kind, values in world.events if kind == "worker_lost"] == ["replaced"]
    assert [kind for kind in world.told() if kind.startswith("worker")] == [
        "worker_lost",
        "worker_joined",
        "worker_ready",
    ]


def _device(**errors: Any) -> dict[str, Any]:
    return {"memory": pb.MemoryReport(devices=[pb.Device(index=1, **errors)])}


def test_new_errors_of_a_device_are_told_and_old_ones_are_not() -> None:
    world = World()
    world.register(load=pb.LoadReport(state=READY, **_device(xid_errors={31: 2}, num_uncorrected_ecc_errors=5)))
    world.told()
    world.watch.look()
    assert world.told() == [], "these were there before this gateway was"
    world.beat(**_device(xid_errors={31: 2, 79: 1}, num_uncorrected_ecc_errors=7))
    world.watch.look()
    world.watch.look()
    assert [(kind, values["device"], values["cause"], values["count"]) for kind, values in world.events] == [
        ("device_error", "GPU 1", "XID 79", 1),
        ("device_error", "GPU 1", "uncorrected ECC", 2),
    ]


def test_a_large_fleet_is_looked_at_in_parts_and_no_worker_is_left_out() -> None:
    world = World()
    for number in range(250):
        world.register(str(number), load=pb.LoadReport(state=READY, **_device()))
    for _ in range(3):
        world.watch.look()
    world.told()
    for number in range(250):
        world.beat(str(number), **_device(xid_errors={13: 1}))
    for _ in range(3):
        world.watch.look()
    assert world.told() == ["device_error"] * 250


def test_a_worker_keeps_its_name_after_it_has_left() -> None:
    world = World()
    world.register()
    world.registry.deregister("w", "1")
    assert world.names.of("w") == "name of w"
    assert world.names.of("unknown") == "unknown"
