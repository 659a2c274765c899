"""Describes the registered workers for GET /v1/workers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from control_plane.fleet.call_watch import Status
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

_ROLES = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
    pb.WORKER_ROLE_KV: "kv",
    pb.WORKER_ROLE_ENCODE: "encode",
}
_MAX_NAME_CHARACTERS = 256
_FRESH_SECONDS = 0.25
"""How old a prepared list may be, if no worker has come, gone or changed its state."""
_WORKERS_PER_TURN = 25
"""Each takes some 50 us: a thousand at once would hold up the streams of tokens."""


class FleetStatus:
    """Implements the FleetView of the HTTP API."""

    def __init__(
        self,
        registry: WorkerRegistry,
        orphans_of: Callable[[str], list[dict[str, Any]]] = lambda incarnation: [],
        problem_of: Callable[[str], str] = lambda model_id: "",
        health_of: Callable[[Worker], Status] = lambda worker: Status("ok"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`problem_of` returns why a model cannot be used although its workers are there; "" if it can.

        `health_of` returns how requests of this gateway find a worker. `clock` gives monotonic seconds.
        """
        self._registry = registry
        self._orphans_of = orphans_of
        self._problem_of = problem_of
        self._health_of = health_of
        self._clock = clock
        self._num_changes = 0
        self._body, self._made_at, self._made_of = b"", -math.inf, -1
        self._making: asyncio.Task[None] | None = None
        registry.listen(self._changed)

    async def workers_body(self) -> bytes:
        """Return every registered worker in a stable order, as the JSON text of a list, at most 0.25 s old.

        It has every change of a worker's registration or state that was before the call. However many ask, it is made
        once at a time, in short turns of the event loop.
        """
        num_changes = self._num_changes
        while self._made_of < num_changes or self._clock() - self._made_at >= _FRESH_SECONDS:
            if self._making is None:
                self._making = asyncio.create_task(self._make_body(), name="workers_body")
                self._making.add_done_callback(self._made)
            await asyncio.shield(self._making)  # a caller that leaves must not end it for others
        return self._body

    async def _make_body(self) -> None:
        made_of, made_at, rows = self._num_changes, self._clock(), []
        for number, worker in enumerate(sorted(self._registry.workers(), key=_order)):
            if number % _WORKERS_PER_TURN == 0:
                await asyncio.sleep(0)
            rows.append(json.dumps(self._row(worker, made_at), ensure_ascii=False, separators=(",", ":")))
        self._body = f'{{"object":"list","data":[{",".join(rows)}]}}'.encode()
        self._made_of, self._made_at = made_of, self._clock()

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making = None
        if not task.cancelled():
            task.exception()  # every caller may have left

    def _row(self, worker: Worker, now: float) -> dict[str, Any]:
        return {
            **_worker(worker, now, self._problem_of),
            **health_fields(self._health_of(worker)),
            "orphans": self._orphans_of(worker.incarnation),
        }

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self._num_changes += 1

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Return the processes that report an address of metrics, in a stable order.

        https://prometheus.io/docs/prometheus/latest/http_sd/
        """
        found = [worker.info for worker in self._registry.workers() if worker.info.metrics_address]
        return [_target(info) for info in sorted(found, key=lambda info: info.worker_id)]


def _order(worker: Worker) -> tuple[str, str]:
    return worker_role(worker.info), worker.worker_id


def worker_name(info: pb.WorkerInfo) -> str:
    """Return the worker's --worker-id, if it can be shown in a terminal; with certificates its id is another."""
    name = info.settings.get("worker_id", "")
    return name if 0 < len(name) <= _MAX_NAME_CHARACTERS and name.isprintable() else info.worker_id


def worker_role(info: pb.WorkerInfo) -> str:
    return _ROLES.get(info.role, "unknown")


def worker_state(load: pb.LoadReport) -> str:
    return pb.WorkerState.Name(load.state).removeprefix("WORKER_STATE_").lower()


def worker_problem(worker: Worker, problem_of: Callable[[str], str]) -> str:
    """Return why the worker gets no requests; "" if nothing is wrong. `problem_of` takes a model's id."""
    return worker.load.error or _apart(worker) or problem_of(worker.info.card.model_id)


def health_fields(status: Status) -> dict[str, str]:
    """Return how requests find a worker, and why."""
    return {"health": status.state, "health_reason": status.reason}


def _target(info: pb.WorkerInfo) -> dict[str, Any]:
    labels = {
        "__scheme__": "https" if info.metrics_tls else "http",
        "role": worker_role(info),
        "worker": info.worker_id,
        "host_id": info.host_id,
    }
    return {"targets": [info.metrics_address], "labels": labels}


def _worker(worker: Worker, now: float, problem_of: Callable[[str], str]) -> dict[str, Any]:
    info, load = worker.info, worker.load
    return {
        "id": info.worker_id,
        "name": worker_name(info),
        "role": worker_role(info),
        "state": worker_state(load),
        "suspected": worker.is_suspected,
        "address": info.address,
        "host_id": info.host_id,
        "incarnation": info.incarnation,
        "model": info.card.model_id or None,
        "version": info.version,
        "heartbeat_age_seconds": round(now - worker.last_heartbeat, 2),
        "load": {
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "num_tokens_in_flight": load.num_tokens_in_flight,
            "load_stage": load.load_stage,
            "load_progress": round(load.load_progress, 3),
            "error": worker_problem(worker, problem_of),
            "counters": dict(load.counters),
        },
        "kv": kv_pool(load.kv) if load.HasField("kv") else None,
        "kv_service": _kv_service(load.kv_service) if load.HasField("kv_service") else None,
        "memory": _memory(load.memory),
    }


def _apart(worker: Worker) -> str:
    if not worker.apart_for:
        return ""
    if worker.apart_for == "block_size":
        return (
            f"kept apart: its blocks have {worker.info.card.block_size} tokens, which is no multiple of the gateway's "
            "--hash-grain; start it with another --block-size, or all gateways with another --hash-grain"
        )
    return (
        f"kept apart: its {worker.apart_for} differs from that of most workers of {worker.info.card.model_id}; "
        "give all of them the same model files"
    )


def kv_pool(pool: pb.KvPool) -> dict[str, int]:
    """Return the blocks of a worker's pool, by what they are used for."""
    return {
        "total_blocks": pool.num_total_blocks,
        "free_blocks": pool.num_free_blocks,
        "cached_blocks": pool.num_cached_blocks,
        "used_blocks": pool.num_used_blocks,
        "held_blocks": pool.num_held_blocks,
        "tokens_per_block": pool.tokens_per_block,
        "bytes_per_block": pool.bytes_per_block,
    }


def _kv_service(load: pb.KvServiceLoad) -> dict[str, Any]:
    store = _fields(load.store) if load.HasField("store") else None
    return {**_fields(load), "links": [_fields(link) for link in load.links], "store": store}


def _fields(message: Message) -> dict[str, Any]:
    """Return all fields; None for an optional one that is absent."""
    fields = message.DESCRIPTOR.fields
    absent = {each.name for each in fields if each.containing_oneof is not None and not message.HasField(each.name)}
    return {each.name: None if each.name in absent else getattr(message, each.name) for each in fields}


def _memory(memory: pb.MemoryReport) -> dict[str, Any]:
    return {
        "source": memory.source,
        "host": _fields(memory.host),
        "devices": [_device(device) for device in memory.devices],
    }


def _device(device: pb.Device) -> dict[str, Any]:
    lists = {"throttle_reasons": list(device.throttle_reasons), "xid_errors": dict(device.xid_errors)}
    return {**_fields(device), **lists}
