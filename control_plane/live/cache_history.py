"""Watches the tiers of the KV cache, and how much of the prompts they save, over the last hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

SAMPLE_SECONDS = 5.0
MAX_POINTS = 720
_SHARE_SECONDS = 60.0
"""Over so many seconds, prompts count for the share that is shown as a number."""
_WORKERS_PER_TURN = 100


class _Prompts(NamedTuple):
    """Prompt tokens of one worker since it started."""

    computed: float
    cached: float
    loaded: float
    """Of the cached ones: those that came from a store, of this host or of another."""


@dataclass(frozen=True)
class Point:
    """A sample: prompt tokens since the sample before, and the bytes of each tier."""

    time_ms: int
    prompt_tokens: float
    pool_tokens: float
    store_tokens: float
    pool_bytes: int
    store_bytes: int
    disk_bytes: int

    def to_json(self) -> dict[str, Any]:
        cached = self.pool_tokens + self.store_tokens
        return {
            "time_ms": self.time_ms,
            "prompt_tokens": round(self.prompt_tokens),
            "pool_tokens": round(self.pool_tokens),
            "store_tokens": round(self.store_tokens),
            "hit_share": round(cached / self.prompt_tokens, 4) if self.prompt_tokens else None,
            "pool_bytes": self.pool_bytes,
            "store_bytes": self.store_bytes,
            "disk_bytes": self.disk_bytes,
        }


class CacheHistory:
    """Sums over all workers, from their heartbeats: the history is the fleet's, whichever gateway shows it."""

    def __init__(self, registry: WorkerRegistry, unix_seconds: Callable[[], float] = time.time) -> None:
        self._registry = registry
        self._unix_seconds = unix_seconds
        self._before: Mapping[str, _Prompts] = {}
        """By incarnation: a worker that starts again counts from zero."""
        self._is_first = True
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.tiers: list[dict[str, Any]] = []

    async def sample(self) -> None:
        """Look at every worker and add a point; the event loop gets a turn after every 100 workers."""
        now: dict[str, _Prompts] = {}
        sums = _Tiers()
        prompt = pool = store = 0.0
        for place, worker in enumerate(self._registry.workers()):
            if place and place % _WORKERS_PER_TURN == 0:
                await asyncio.sleep(0)
            sums.add(worker)
            if worker.role not in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):
                continue
            after = now[worker.incarnation] = _prompts(worker)
            before = self._before.get(worker.incarnation, after if self._is_first else _Prompts(0, 0, 0))
            loaded = max(0.0, after.loaded - before.loaded)
            cached = max(0.0, after.cached - before.cached)
            prompt += max(0.0, after.computed - before.computed) + cached
            pool += max(0.0, cached - loaded)
            store += loaded
        self._before, self._is_first = now, False
        self.tiers = sums.to_json()
        time_ms = int(self._unix_seconds() * 1000)
        self.points.append(Point(time_ms, prompt, pool, store, sums.pool_cached, sums.store_cached, sums.disk_bytes))

    def hit_share(self) -> float | None:
        """Return the part of the last minute's prompt tokens that a cache had; None if there were no prompts."""
        recent = list(self.points)[-round(_SHARE_SECONDS / SAMPLE_SECONDS) :]
        prompt = sum(point.prompt_tokens for point in recent)
        return sum(point.pool_tokens + point.store_tokens for point in recent) / prompt if prompt else None


def _prompts(worker: Worker) -> _Prompts:
    counters = worker.load.counters
    return _Prompts(
        counters.get("prompt_tokens_computed", 0.0),
        counters.get("prompt_tokens_cached", 0.0),
        counters.get("prompt_tokens_loaded", 0.0),
    )


class _Tiers:
    """Bytes of the tiers, summed over workers."""

    def __init__(self) -> None:
        self.pool_total = self.pool_used = self.pool_cached = self.pool_free = 0
        self.store_total = self.store_used = self.store_cached = self.store_free = 0
        self.disk_budget = self.disk_bytes = 0

    def add(self, worker: Worker) -> None:
        load = worker.load
        if load.HasField("kv"):
            pool, size = load.kv, load.kv.bytes_per_block
            self.pool_total += pool.num_total_blocks * size
            self.pool_used += pool.num_used_blocks * size
            self.pool_cached += pool.num_cached_blocks * size
            self.pool_free += pool.num_free_blocks * size
        if load.HasField("kv_service") and load.kv_service.HasField("store"):
            store = load.kv_service.store
            self.store_total += store.total_bytes
            self.store_used += store.leased_bytes + store.filling_bytes
            self.store_cached += store.cached_bytes
            self.store_free += store.free_bytes
            self.disk_budget += store.disk_budget_bytes
            self.disk_bytes += store.disk_bytes

    def to_json(self) -> list[dict[str, Any]]:
        return [
            _tier("pool", self.pool_total, self.pool_used, self.pool_cached, self.pool_free),
            _tier("store", self.store_total, self.store_used, self.store_cached, self.store_free),
            _tier("disk", self.disk_budget, 0, self.disk_bytes, max(0, self.disk_budget - self.disk_bytes)),
        ]


def _tier(tier: str, total: int, used: int, cached: int, free: int) -> dict[str, Any]:
    return {"tier": tier, "total_bytes": total, "used_bytes": used, "cached_bytes": cached, "free_bytes": free}
