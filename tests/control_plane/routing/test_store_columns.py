"""Columns of stores change with what they are of, one entry at a time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.block_stores import BlockStores
from control_plane.routing.store_columns import StoreColumns
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb


def load(speeds: Iterable[tuple[str, float]] = ()) -> pb.LoadReport:
    service = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1))
    for address, speed in speeds:
        service.links.add(address=address, latency_ms=1.0, bytes_per_second=speed)
    return pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=service)


def test_a_change_writes_the_entries_that_it_is_of_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = WorkerRegistry(3.0, 5.0, lambda: 0.0)
    for host in "abc":
        info = pb.WorkerInfo(worker_id=host, incarnation=host, role=pb.WORKER_ROLE_KV, host_id=host, address=host)
        registry.register(info, load())
    stores = BlockStores(registry, lambda: 0.0)
    columns = StoreColumns("abc", stores)
    stores.listen(columns)
    for host in "abc":
        columns.fetches(host, host)
    written: list[tuple[str, str]] = []
    of_fetch = columns._of_fetch

    def noted(from_host: str, address: str, to_host: str) -> tuple[float, ...]:
        written.append((from_host, to_host))
        return of_fetch(from_host, address, to_host)

    monkeypatch.setattr(columns, "_of_fetch", noted)
    stores.used("b", 100, 50)
    assert not written and columns._values[1].tolist() == [1.0, 0.9, 1.0]
    stores.used_from_afar("a", "c", 100, 50)
    assert written == [("a", "c")]
    registry.heartbeat(cp.HeartbeatRequest(worker_id="b", incarnation="b", load=load([("c", 1e6)])))
    registry.heartbeat(cp.HeartbeatRequest(worker_id="b", incarnation="b", load=load([("c", 1e6)])))
    assert written == [("a", "c"), ("c", "b")]
    assert columns._fetches["c"].values[1].tolist() == [1e9, 1e6, 1e9]
