"""Of many encode workers, a look compares a bounded number."""

from __future__ import annotations

import random

from control_plane.dispatch.encode_workers import MAX_COMPARED, EncodeWorkers
from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import types_pb2 as pb

READY, LOADING = pb.WORKER_STATE_READY, pb.WORKER_STATE_LOADING


def registry_of(num_workers: int) -> WorkerRegistry:
    registry = WorkerRegistry(1e6, 1e7)
    for number in range(num_workers):
        register(registry, f"e-{number}")
    return registry


def register(registry: WorkerRegistry, name: str, state: pb.WorkerState.ValueType = READY, model_id: str = "m") -> None:
    info = pb.WorkerInfo(worker_id=name, incarnation=name, role=pb.WORKER_ROLE_ENCODE)
    info.card.model_id = model_id
    registry.register(info, pb.LoadReport(state=state))


def names(workers: EncodeWorkers, first: str = "") -> list[str]:
    return [each.worker_id for each in workers.some("m", first)]


def test_of_few_workers_all_are_compared_and_only_those_that_may_be_used() -> None:
    registry = registry_of(3)
    register(registry, "loading", LOADING)
    register(registry, "other", model_id="other")
    workers = EncodeWorkers(registry)
    assert sorted(names(workers)) == ["e-0", "e-1", "e-2"]
    register(registry, "loading")
    register(registry, "e-0", LOADING)
    registry.deregister("e-1", "e-1")
    register(registry, "e-2", model_id="other")
    assert names(workers) == ["loading"]
    assert EncodeWorkers(registry).some("nobody's") == []


def test_of_many_workers_those_that_told_of_room_come_first_and_all_have_their_turns() -> None:
    registry = registry_of(300)
    workers = EncodeWorkers(registry, random.Random(7))
    for number in range(250, 270):
        worker = registry.get(f"e-{number}")
        assert worker is not None
        workers.told(worker)
    registry.deregister("e-269", "e-269")
    found = [names(workers, "e-299") for _ in range(100)]
    assert {len(set(each)) for each in found} == {MAX_COMPARED}
    latest = [f"e-{number}" for number in range(268, 253, -1)]
    assert all(each[: len(latest) + 1] == ["e-299", *latest] for each in found)
    assert len({name for each in found for name in each}) > 290
