"""Describes workers and hosts for the live page, and finds what has changed since the last look.

A fleet may have thousands of workers: the event loop gets a turn after every 50 of them, a worker without a new
heartbeat costs nothing, and what did not change is not sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from control_plane.fleet.call_watch import Status
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.status import (
    health_fields,
    kv_pool,
    worker_name,
    worker_problem,
    worker_role,
    worker_state,
)
from tandem.v1 import types_pb2 as pb

_WORKERS_PER_TURN = 50
_MEMORY_STEP_BYTES = 4 << 20
"""Memory of a host is shown in steps: each heartbeat has another number of free bytes."""
_SILENT_SECONDS = 3.0
"""From so long a silence on, its whole seconds are shown."""

_Seat = tuple[float, pb.Device]
"""How a worker sees a device, and the seconds that NVML has not answered it."""

_encode = msgspec.json.Encoder().encode


@dataclass
class Changes:
    """Rows as JSON: new and changed ones, and the ids of rows that are gone."""

    workers: list[msgspec.Raw] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    hosts: list[msgspec.Raw] = field(default_factory=list)
    hosts_gone: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.workers or self.gone or self.hosts or self.hosts_gone)


@dataclass
class _Seen:
    """A worker as it was described last."""

    worker: Worker
    row: dict[str, Any]
    encoded: bytes
    health: Status


class FleetRows:
    """Keeps one row per worker and one per host. `clock` gives monotonic seconds, as the registry's does."""

    def __init__(
        self,
        registry: WorkerRegistry,
        orphan_bytes_of: Callable[[str], int] = lambda incarnation: 0,
        problem_of: Callable[[str], str] = lambda model_id: "",
        clock: Callable[[], float] = time.monotonic,
        health_of: Callable[[Worker], Status] = lambda worker: Status("ok"),
    ) -> None:
        """`orphan_bytes_of` takes an incarnation; `problem_of` says why a model cannot be used, "" if it can.

        `health_of` returns how requests find a worker.
        """
        self._registry = registry
        self._orphan_bytes_of = orphan_bytes_of
        self._problem_of = problem_of
        self._clock = clock
        self._health_of = health_of
        self._seen: dict[str, _Seen] = {}
        self._hosts: dict[str, bytes] = {}

    async def changes(self) -> Changes:
        """Return what changed since the last call, and let the event loop turn in between."""
        found = Changes()
        workers = {worker.worker_id: worker for worker in self._registry.workers()}
        newest: dict[str, Worker] = {}
        devices: dict[str, dict[str, list[_Seat]]] = {}
        for place, worker in enumerate(workers.values()):
            if place and place % _WORKERS_PER_TURN == 0:
                await asyncio.sleep(0)
            self._look_at(worker, found)
            host_id = worker.info.host_id
            if host_id not in newest or newest[host_id].last_heartbeat < worker.last_heartbeat:
                newest[host_id] = worker
            for device in worker.load.memory.devices:
                seat = worker.load.memory.device_age_seconds, device
                key = device.uuid or str(device.index)
                devices.setdefault(host_id, {}).setdefault(key, []).append(seat)
        found.gone = [worker_id for worker_id in self._seen if worker_id not in workers]
        for worker_id in found.gone:
            del self._seen[worker_id]
        await asyncio.sleep(0)
        for host_id, worker in newest.items():
            encoded = _encode(_host(worker, devices.get(host_id, {}).values()))
            if self._hosts.get(host_id) != encoded:
                self._hosts[host_id] = encoded
                found.hosts.append(msgspec.Raw(encoded))
        found.hosts_gone = [host_id for host_id in self._hosts if host_id not in newest]
        for host_id in found.hosts_gone:
            del self._hosts[host_id]
        return found

    def everything(self) -> Changes:
        """Return all rows as of the last look, for a viewer who has seen nothing yet."""
        return Changes(
            workers=[msgspec.Raw(seen.encoded) for seen in self._seen.values()],
            hosts=[msgspec.Raw(encoded) for encoded in self._hosts.values()],
        )

    def output_tokens_per_second(self) -> float:
        """Return the tokens that all decode workers together made in a second, by their last heartbeats."""
        rates = (seen.row["tokens_per_second"] for seen in self._seen.values() if seen.row["role"] == "decode")
        return sum(rate or 0.0 for rate in rates)

    def _look_at(self, worker: Worker, found: Changes) -> None:
        seen = self._seen.get(worker.worker_id)
        silence = self._clock() - worker.last_heartbeat
        silent_seconds = int(silence) if silence >= _SILENT_SECONDS else 0
        health = self._health_of(worker)
        is_same = seen is not None and seen.worker is worker and seen.health == health
        if is_same and seen is not None and seen.row["silent_seconds"] == silent_seconds:
            return
        row = self._row(worker, seen, silent_seconds) | health_fields(health)
        encoded = _encode(row)
        if seen is None or seen.encoded != encoded:
            found.workers.append(msgspec.Raw(encoded))
        self._seen[worker.worker_id] = _Seen(worker, row, encoded, health)

    def _row(self, worker: Worker, seen: _Seen | None, silent_seconds: int) -> dict[str, Any]:
        info, load = worker.info, worker.load
        return {
            "id": info.worker_id,
            "name": worker_name(info),
            "role": worker_role(info),
            "state": worker_state(load),
            "suspected": worker.is_suspected,
            "silent_seconds": silent_seconds,
            "host_id": info.host_id,
            "address": info.address,
            "incarnation": info.incarnation,
            "version": info.version,
            "model": info.card.model_id or None,
            "error": worker_problem(worker, self._problem_of),
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "num_tokens_in_flight": load.num_tokens_in_flight,
            "load_stage": load.load_stage,
            "load_progress": round(load.load_progress, 2),
            "tokens_per_second": _tokens_per_second(worker, seen),
            "process_bytes": _in_steps(load.memory.host.process_bytes),
            "orphan_bytes": self._orphan_bytes_of(info.incarnation),
            "kv": kv_pool(load.kv) if load.HasField("kv") else None,
            "store": _store(load.kv_service) if load.HasField("kv_service") else None,
        }


def _tokens_per_second(worker: Worker, seen: _Seen | None) -> float | None:
    """Return the rate between the last two heartbeats; None for a role that makes no tokens, or a first look."""
    made = worker.load.counters.get("tokens_generated")
    if made is None or seen is None or seen.worker.incarnation != worker.incarnation:
        return None
    seconds = worker.last_heartbeat - seen.worker.last_heartbeat
    if seconds <= 0:
        return seen.row["tokens_per_second"]  # type: ignore[no-any-return]
    return round(max(0.0, made - seen.worker.load.counters.get("tokens_generated", 0.0)) / seconds, 1)


def _store(service: pb.KvServiceLoad) -> dict[str, int]:
    store = service.store
    return {
        "total_bytes": store.total_bytes,
        "free_bytes": store.free_bytes,
        "cached_bytes": store.cached_bytes,
        "leased_bytes": store.leased_bytes,
        "filling_bytes": store.filling_bytes,
        "disk_budget_bytes": store.disk_budget_bytes,
        "disk_bytes": store.disk_bytes,
        "arena_bytes": service.arena_bytes,
        "arena_free_bytes": service.arena_free_bytes,
        "num_handles": service.num_handles,
    }


def _host(worker: Worker, devices: Iterable[list[_Seat]]) -> dict[str, Any]:
    host = worker.load.memory.host
    rows = [_device(seats) for seats in devices]
    return {
        "host_id": worker.info.host_id,
        "total_bytes": host.total_bytes,
        "available_bytes": _in_steps(host.available_bytes),
        "source": worker.load.memory.source,
        "devices": sorted(rows, key=lambda row: (row["index"], row["mig_instance"])),
    }


def _device(seats: list[_Seat]) -> dict[str, Any]:
    """Return one row for the workers of a device, by the reading that is newest; None: not known.

    `own_bytes` is what all of Tandem holds: the driver's own memory included where the foreign memory is known, else
    the sum of what each worker holds.
    """
    _, device = min(seats, key=lambda seat: seat[0])
    foreign = [each.foreign_bytes for _, each in seats if each.HasField("foreign_bytes")]
    own = [each.own_bytes for _, each in seats if each.HasField("own_bytes")]
    foreign_bytes = min(*foreign, device.used_bytes) if foreign else None
    own_bytes = min(sum(own), device.used_bytes) if len(own) == len(seats) else None
    return {
        "index": device.index,
        "mig_instance": device.mig_instance,
        "name": device.name,
        "total_bytes": device.total_bytes,
        "used_bytes": device.used_bytes,
        "own_bytes": own_bytes if foreign_bytes is None else device.used_bytes - foreign_bytes,
        "foreign_bytes": foreign_bytes,
        "foreign_unknown": "" if foreign else device.foreign_unknown,
        "free_bytes": device.free_bytes,
        "utilization_percent": _known(device, "utilization_percent"),
        "temperature_celsius": _known(device, "temperature_celsius"),
        "power_watts": round(device.power_milliwatts / 1000) if device.HasField("power_milliwatts") else None,
        "throttle_reasons": list(device.throttle_reasons),
        "error": device.error,
    }


def _known(device: pb.Device, name: Literal["utilization_percent", "temperature_celsius"]) -> int | None:
    return int(getattr(device, name)) if device.HasField(name) else None


def _in_steps(num_bytes: int) -> int:
    return num_bytes // _MEMORY_STEP_BYTES * _MEMORY_STEP_BYTES
