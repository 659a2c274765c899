"""All that workers report is shown as plain JSON."""

from __future__ import annotations

import json

import pytest

from control_plane.fleet.call_watch import Status
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.status import FleetStatus
from tandem.v1 import types_pb2 as pb
from tests.control_plane.scripted_worker import kv_load, kv_service


def test_a_kv_services_links_and_store_are_shown() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    load = kv_load()
    load.kv_service.links.add(address="far:1", transport="tcp", bytes_per_second=5.0)
    registry.register(kv_service(), load)
    registry.register(kv_service("kv-1", "127.0.0.1:2"), pb.LoadReport(kv_service=pb.KvServiceLoad(num_handles=3)))
    first, second = json.loads(json.dumps(FleetStatus(registry).workers()))
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
    [row] = FleetStatus(registry).workers()
    assert (row["id"], row["name"]) == ("ab", shown)


def test_a_workers_health_is_shown_with_its_reason() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    registry.register(kv_service(), kv_load())
    [row] = FleetStatus(registry, health_of=lambda worker: Status("ejected", "broken")).workers()
    assert (row["health"], row["health_reason"]) == ("ejected", "broken")
