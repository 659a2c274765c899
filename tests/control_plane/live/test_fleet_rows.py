"""The live page gets what changed, in turns that stay short however many workers there are."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from control_plane.fleet.call_watch import Status
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.live.fleet_rows import Changes, FleetRows
from tandem.v1 import types_pb2 as pb
from tests.herd import GIB, Herd, load_of
from tests.loop_turns import counted_turns


class World:
    def __init__(self, num_workers: int, **options: Any) -> None:
        self.now = 100.0
        self.registry = WorkerRegistry(3600.0, 7200.0, lambda: self.now)
        self.herd = Herd(self.registry, num_workers)
        self.rows = FleetRows(self.registry, clock=lambda: self.now, **options)


def decoded(raws: list[msgspec.Raw]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(bytes(raw)) for raw in raws]


def ids(changes: Changes) -> list[str]:
    return [row["id"] for row in decoded(changes.workers)]


async def test_the_first_look_has_all_and_the_next_has_nothing() -> None:
    world = World(16)
    first = await world.rows.changes()
    assert len(first.workers) == 16 and [row["host_id"] for row in decoded(first.hosts)] == ["rack-0", "rack-1"]
    assert not await world.rows.changes()


async def test_a_heartbeat_that_changes_nothing_is_not_sent() -> None:
    world = World(8)
    world.herd.beat(1, load_of(1))
    await world.rows.changes()
    world.now += 1
    world.herd.beat(1, load_of(1))
    assert ids(await world.rows.changes()) == ["decode-1"], "its rate is known now"
    world.now += 1
    world.herd.beat(1, load_of(1))
    assert not await world.rows.changes()


async def test_only_the_worker_that_changed_is_sent_with_its_state_and_its_rate() -> None:
    world = World(16)
    await world.rows.changes()
    world.now += 2
    world.herd.beat(3, load_of(3, state=pb.WORKER_STATE_DRAINING, num_running=2, tokens_generated=50))
    (row,) = decoded((await world.rows.changes()).workers)
    assert (row["id"], row["state"], row["num_running"]) == ("decode-3", "draining", 2)
    assert row["tokens_per_second"] == 25 and world.rows.output_tokens_per_second() == 25


async def test_a_worker_that_leaves_is_gone_and_so_is_a_host_without_workers() -> None:
    world = World(9)
    await world.rows.changes()
    world.herd.leave(8)
    changes = await world.rows.changes()
    assert (changes.gone, changes.hosts_gone) == (["prefill-8"], ["rack-1"])
    assert len(world.rows.everything().workers) == 8


async def test_memory_of_a_device_is_divided_by_owner() -> None:
    world = World(8)
    await world.rows.changes()
    world.now += 1
    world.herd.beat(1, load_of(1, own_bytes=10 * GIB))
    (host,) = decoded((await world.rows.changes()).hosts)
    (device,) = [device for device in host["devices"] if device["index"] == 1]
    assert len(host["devices"]) == 7, "one of each worker that has a device"
    assert (device["own_bytes"], device["foreign_bytes"], device["free_bytes"]) == (10 * GIB, 4 * GIB, 66 * GIB)


async def test_two_workers_of_a_device_are_one_owner_of_it() -> None:
    world = World(4)
    shared: dict[str, Any] = {
        "name": "shared",
        "uuid": "GPU-shared",
        "total_bytes": 80 * GIB,
        "used_bytes": 75 * GIB,
        "free_bytes": 5 * GIB,
    }

    async def row(*devices: pb.Device, ages: tuple[float, ...] = (0, 0)) -> dict[str, Any]:
        world.now += 1
        for place, (device, age) in enumerate(zip(devices, ages, strict=True), 1):
            load = load_of(place)
            load.memory.CopyFrom(pb.MemoryReport(devices=[device], device_age_seconds=age))
            world.herd.beat(place, load)
        (host,) = decoded((await world.rows.changes()).hosts)
        (found,) = [each for each in host["devices"] if each["name"] == "shared"]
        return dict(found)

    known = await row(
        pb.Device(**shared, own_bytes=30 * GIB, foreign_bytes=4 * GIB),
        pb.Device(**shared, own_bytes=40 * GIB, foreign_unknown="it loads"),
    )
    assert (known["own_bytes"], known["foreign_bytes"], known["foreign_unknown"]) == (71 * GIB, 4 * GIB, "")
    summed = await row(
        pb.Device(**shared, own_bytes=30 * GIB, foreign_unknown="ambiguous"),
        pb.Device(**shared, own_bytes=40 * GIB, foreign_unknown="ambiguous"),
    )
    assert (summed["own_bytes"], summed["foreign_bytes"], summed["foreign_unknown"]) == (70 * GIB, None, "ambiguous")
    silent = await row(
        pb.Device(**shared, error="NVML has not answered for 9 s"),
        pb.Device(**shared, own_bytes=40 * GIB, utilization_percent=0),
        ages=(9, 0),
    )
    assert (silent["own_bytes"], silent["utilization_percent"], silent["power_watts"]) == (None, 0, None)
    assert silent["error"] == "", "the newest reading"


async def test_a_silent_worker_shows_for_how_many_seconds() -> None:
    world = World(1)
    await world.rows.changes()
    world.now += 2
    assert not await world.rows.changes()
    world.now += 2.5
    (row,) = decoded((await world.rows.changes()).workers)
    assert row["silent_seconds"] == 4


async def test_what_is_wrong_with_a_worker_is_in_its_row() -> None:
    world = World(1, orphan_bytes_of=lambda incarnation: 4096, problem_of=lambda model: f"{model} has no template")
    (row,) = decoded((await world.rows.changes()).workers)
    assert (row["orphan_bytes"], row["error"]) == (4096, "@stand-in/model has no template")


async def test_a_thousand_workers_are_looked_at_in_many_turns_of_the_event_loop() -> None:
    world = World(1000)
    with counted_turns() as turns:
        await asyncio.sleep(0)
        before = turns.now
        assert len((await world.rows.changes()).workers) == 1000
        assert turns.now - before >= 20


async def test_a_workers_health_is_sent_when_it_changes_without_a_heartbeat() -> None:
    health = {"decode-3": Status("ok")}

    def health_of(worker: Worker) -> Status:
        return health.get(worker.worker_id, Status("ok"))

    world = World(8, health_of=health_of)
    await world.rows.changes()
    health["decode-3"] = Status("ejected", "it answered InternalError")
    (row,) = decoded((await world.rows.changes()).workers)
    assert (row["id"], row["health"], row["health_reason"]) == ("decode-3", "ejected", "it answered InternalError")
    assert not await world.rows.changes()
