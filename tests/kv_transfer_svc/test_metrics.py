"""A KV service exports its load report: handles, arena, store and links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer_svc import metrics as kv_metrics
from kv_transfer_svc.load import COUNTERS
from kv_transfer_svc.transport.stats import export_gauges
from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics
from tandem_runtime.kv_handle import HandleState
from tests.scrape import Scrape


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    metrics.configure("tandem-test", None)
    yield
    metrics.shutdown()


def test_the_tiers_of_the_store_are_exported_with_their_lookups() -> None:
    store = {"hits": 70, "misses": 30, "evictions": 5, "memory_corrupt": 1, "stored": 90, "refused": 7}
    counters = {f"store_{name}": float(value) for name, value in {**store, "refused_over_quota": 2}.items()}
    counters |= {"disk_hits": 10.0, "disk_misses": 20.0, "disk_evicted": 3.0, "disk_corrupt": 0.0}
    load = pb.KvStoreLoad(
        free_bytes=10, cached_bytes=20, leased_bytes=30, filling_bytes=40, disk_budget_bytes=100, disk_bytes=25
    )
    report = pb.LoadReport(
        kv_service=pb.KvServiceLoad(arena_bytes=100, arena_free_bytes=60, leased_bytes=7, store=load),
        counters={**dict.fromkeys(COUNTERS, 0.0), **counters, "handles_expired": 4.0},
    )
    kv_metrics.export(lambda: report, lambda: [HandleState.LEASED, HandleState.LEASED, HandleState.FILLING])
    found = Scrape(metrics.exposition())

    def by(name: str, *keys: str) -> dict[tuple[str, ...], float]:
        return {tuple(labels[key] for key in keys): value for labels, value in found.series(name)}

    assert by("tandem_kv_store_size_bytes", "tier", "state") == {
        ("memory", "free"): 10,
        ("memory", "cached"): 20,
        ("memory", "leased"): 30,
        ("memory", "filling"): 40,
        ("disk", "used"): 25,
        ("disk", "free"): 75,
    }
    assert by("tandem_kv_store_lookups_total", "tier") == {("memory",): 100, ("disk",): 30}
    assert by("tandem_kv_store_hits_total", "tier") == {("memory",): 70, ("disk",): 10}
    assert by("tandem_kv_store_evictions_total", "tier") == {("memory",): 5, ("disk",): 3}
    assert by("tandem_kv_store_corrupt_total", "tier") == {("memory",): 1, ("disk",): 0}
    assert by("tandem_kv_store_refused_total", "reason") == {("memory",): 7, ("quota",): 2}
    assert by("tandem_kv_handles", "state") == {("reserved",): 0, ("filling",): 1, ("sealed",): 0, ("leased",): 2}
    assert by("tandem_kv_handle_changes_total", "state")[("expired",)] == 4
    assert by("tandem_kv_arena_size_bytes", "state") == {("free",): 60, ("used",): 40}
    assert (found.value("tandem_kv_store_stored_total"), found.value("tandem_kv_leased_bytes")) == (90, 7)


def test_a_service_without_a_store_and_without_a_report_exports_what_it_has() -> None:
    kv_metrics.export(pb.LoadReport, list)
    found = Scrape(metrics.exposition())
    assert found.value("tandem_kv_handles") == 0
    assert found.series("tandem_kv_store_size_bytes") == found.series("tandem_kv_store_lookups_total") == []


def test_links_are_exported_by_host_also_while_a_restarted_service_has_two() -> None:
    links = [
        pb.KvLink(address=f"10.0.0.2:{port}", host_id="host-2", transport="tcp", num_bytes=port, bytes_per_second=port)
        for port in (7, 8)
    ]
    export_gauges(lambda: links)
    found = Scrape(metrics.exposition())
    labels = {"peer": "host-2", "transport": "tcp"}
    assert found.series("tandem_kv_link_bytes_total") == [(labels, 15)]
    assert found.series("tandem_kv_link_bytes_per_second") == [(labels, 8)]
