"""What does this service say of itself?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.host_cache import PromptCache
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
"""Totals since start. `handles_<state>` counts the handles that came to a state; bytes are those between services."""

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
    store: HandleStore, arena: Arena, prompt_cache: PromptCache | None, links: Sequence[pb.KvLink] = ()
) -> pb.LoadReport:
    """Return the service's figures as they are now."""
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
            orphan_bytes=store.orphan_bytes + (prompt_cache.orphan_bytes() if prompt_cache is not None else 0),
            links=links,
        ),
    )
    if prompt_cache is not None:
        report.kv_service.store.CopyFrom(_store_load(prompt_cache))
        report.counters.update(_store_counters(prompt_cache))
    return report


def _store_load(cache: PromptCache) -> pb.KvStoreLoad:
    memory = cache.blocks.figures()
    load = pb.KvStoreLoad(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        cached_bytes=memory.cached_bytes,
        leased_bytes=memory.leased_bytes,
        filling_bytes=memory.filling_bytes,
        num_blocks=memory.num_blocks,
    )
    if cache.disk is not None:
        disk = cache.disk.figures()
        load.disk_budget_bytes, load.disk_bytes, load.num_disk_blocks = (
            disk.budget_bytes,
            disk.num_bytes,
            disk.num_blocks,
        )
    return load


def _store_counters(cache: PromptCache) -> dict[str, float]:
    """Return totals since start, in blocks."""
    memory = cache.blocks.figures().flat()
    counters = {f"store_{name}": float(memory[name]) for name in _STORE_COUNTERS}
    counters |= {f"store_{name}": float(cache.counters[name]) for name in _CACHE_COUNTERS}
    if cache.disk is not None:
        of_disk = asdict(cache.disk.figures().counters)
        counters |= {f"disk_{name.removeprefix('disk_')}": float(number) for name, number in of_disk.items()}
    return counters
