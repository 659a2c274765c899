"""All that workers report is shown as plain JSON."""

from __future__ import annotations

import asyncio
import json

import pytest

from control_plane.fleet.call_watch import Status
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.status import FleetStatus
from tandem.v1 import types_pb2 as pb
from tests.control_plane.scripted_worker import kv_load, kv_service
from tests.control_plane.worker_rows import rows_of, worker_rows


def test_a_kv_services_links_and_store_are_shown() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    load = kv_load()
    load.kv_service.links.add(address="far:1", transport="tcp", bytes_per_second=5.0)
    registry.register(kv_service(), load)
    registry.register(kv_service("kv-1", "127.0.0.1:2"), pb.LoadReport(kv_service=pb.KvServiceLoad(num_handles=3)))
    first, second = rows_of(FleetStatus(registry))
    assert first["kv_service"]["store"]["total_bytes"] == 1 << 20
    assert [(link["address"], link["transport"]) for link in first["kv_service"]["links"]] == [("far:1", "tcp")]
    assert (second["kv_service"]["store"], second["kv_service"]["num_handles"]) == (None, 3)


@pytest.mark.parametrize(
    ("given", "shown"),
    [("decode-0", "decode-0"), ("", "ab"), ("\x1b[2J", "ab"), ("a\nb", "ab"), ("x" * 257, "ab")],
)
def test_a_worker_is_shown_by_a_name_that_a_terminal_can_print(given: str, shown: str) -> None:
    registry = WorkerRegistry(3.0, 5.0)
    service = kv_service("ab")
    service.settings["worker_id"] = given
    registry.register(service, kv_load())
    [row] = rows_of(FleetStatus(registry))
    assert (row["id"], row["name"]) == ("ab", shown)


def test_a_workers_health_is_shown_with_its_reason() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    registry.register(kv_service(), kv_load())
    [row] = rows_of(FleetStatus(registry, health_of=lambda worker: Status("ejected", "broken")))
    assert (row["health"], row["health_reason"]) == ("ejected", "broken")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def large_fleet(num_workers: int) -> WorkerRegistry:
    registry = WorkerRegistry(3.0, 5.0, lambda: 0.0)
    for number in range(num_workers):
        registry.register(kv_service(f"kv-{number:04}", f"127.0.0.1:{number}"), kv_load())
    return registry


async def test_a_thousand_workers_are_described_once_for_all_that_ask_and_in_short_turns() -> None:
    described: list[str] = []

    def health_of(worker: Worker) -> Status:
        described.append(worker.worker_id)
        return Status("ok")

    registry, clock = large_fleet(1_000), Clock()
    status, num_turns = FleetStatus(registry, health_of=health_of, clock=clock), 0
    asking = asyncio.gather(*(status.workers_body() for _ in range(50)))
    longest = 0
    while not asking.done():
        before = len(described)
        await asyncio.sleep(0)
        num_turns, longest = num_turns + 1, max(longest, len(described) - before)
    assert len(described) == 1_000 and longest <= 50 and num_turns >= 20
    assert len(set(await asking)) == 1
    assert await status.workers_body() in await asking and len(described) == 1_000
    clock.now = 0.3
    await status.workers_body()
    assert len(described) == 2_000, "heartbeats are shown within a quarter of a second"


async def test_a_change_before_the_call_is_in_the_answer() -> None:
    registry = large_fleet(60)
    status = FleetStatus(registry, clock=Clock())
    assert len(await worker_rows(status)) == 60
    registry.deregister("kv-0003", kv_service("kv-0003").incarnation)
    making = asyncio.create_task(status.workers_body())
    await asyncio.sleep(0)
    registry.deregister("kv-0004", kv_service("kv-0004").incarnation)
    ids = {row["id"] for row in await worker_rows(status)}
    assert ids.isdisjoint({"kv-0003", "kv-0004"}) and len(ids) == 58
    await making


async def test_one_that_leaves_does_not_end_it_for_others() -> None:
    status = FleetStatus(large_fleet(60), clock=Clock())
    leaving, staying = (asyncio.create_task(status.workers_body()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert len(json.loads(await staying)["data"]) == 60
