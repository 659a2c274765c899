"""Builds the load report of a KV service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.store import HandleStore
from tandem.v1 import types_pb2 as pb

COUNTERS = (
    "handles_reserved",
    "handles_sealed",
    "handles_released",
    "handles_aborted",
    "handles_expired",
    "slabs_sealed",
    "slabs_pulled",
    "bytes_served",
    "bytes_pulled",
    "link_errors",
    "link_fallbacks",
    "checksum_failures",
)
"""Totals since start. `handles_<state>` counts handles that reached a state; `bytes_` counts between services."""

_STORE_COUNTERS = (
    "hits",
    "misses",
    "stored",
    "deduplicated",
    "evictions",
    "demotions",
    "refused",
    "refused_over_quota",
)
_CACHE_COUNTERS = ("blocks_loaded", "fetch_failures", "memory_corrupt")


def load_report(
    store: HandleStore, arena: Arena, host_cache: HostCache | None, links: Sequence[pb.KvLink] = ()
) -> pb.LoadReport:
    """Return the service's current load."""
    state = pb.WORKER_STATE_DRAINING if store.draining else pb.WORKER_STATE_READY
    report = pb.LoadReport(
        state=state,
        num_running=store.num_live,
        counters={name: float(store.counters[name]) for name in COUNTERS},
        kv_service=pb.KvServiceLoad(
            arena_bytes=arena.total_bytes,
            arena_free_bytes=arena.free_bytes,
            num_handles=store.num_live,
            num_regions=len(store.regions),
            leased_bytes=store.leased_bytes,
            orphan_bytes=store.orphan_bytes + (host_cache.orphan_bytes() if host_cache is not None else 0),
            links=links,
        ),
    )
    if host_cache is not None:
        report.kv_service.store.CopyFrom(_store_load(host_cache))
        report.counters.update(_store_counters(host_cache))
    return report


def _store_load(cache: HostCache) -> pb.KvStoreLoad:
    memory = cache.blocks.stats()
    load = pb.KvStoreLoad(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        cached_bytes=memory.cached_bytes,
        leased_bytes=memory.leased_bytes,
        filling_bytes=memory.filling_bytes,
        num_blocks=memory.num_blocks,
    )
    if cache.disk is not None:
        disk = cache.disk.stats()
        load.disk_budget_bytes, load.disk_bytes, load.num_disk_blocks = (
            disk.budget_bytes,
            disk.num_bytes,
            disk.num_blocks,
        )
    return load


def _store_counters(cache: HostCache) -> dict[str, float]:
    """Return totals since start, in blocks."""
    memory = cache.blocks.stats().flat()
    counters = {f"store_{name}": float(memory[name]) for name in _STORE_COUNTERS}
    counters |= {f"store_{name}": float(cache.counters[name]) for name in _CACHE_COUNTERS}
    if cache.disk is not None:
        disk_counters = asdict(cache.disk.stats().counters)
        counters |= {f"disk_{name.removeprefix('disk_')}": float(number) for name, number in disk_counters.items()}
    return counters
