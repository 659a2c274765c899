"""What does this service say of itself?"""

from __future__ import annotations

from kv_transfer_svc.arena import Arena
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
)
"""Totals since start. `handles_<state>` counts the handles that came to a state; bytes are those sent over gRPC."""


def load_report(store: HandleStore, arena: Arena) -> pb.LoadReport:
    """Return the service's figures as they are now."""
    state = pb.WORKER_STATE_DRAINING if store.draining else pb.WORKER_STATE_READY
    return pb.LoadReport(
        state=state,
        num_running=store.num_live,
        counters={name: float(store.counters[name]) for name in COUNTERS},
        kv_service=pb.KvServiceLoad(
            arena_bytes=arena.total_bytes,
            arena_free_bytes=arena.free_bytes,
            num_handles=store.num_live,
            num_regions=len(store.regions),
            leased_bytes=store.leased_bytes,
            orphan_bytes=store.orphan_bytes,
        ),
    )
