"""Typed answers of GET /v1/workers: the workers and KV services of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tandem_client.connection import Connection


@dataclass(frozen=True)
class Pool:
    """KV blocks of a worker: total = free + cached + used."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    bytes_per_block: int


@dataclass(frozen=True)
class Arena:
    """Memory of a KV service, in bytes."""

    total_bytes: int
    free_bytes: int
    num_handles: int
    orphan_bytes: int


@dataclass(frozen=True)
class Link:
    """A connection over which a KV service pulls bytes from another KV service."""

    address: str
    transport: str
    bytes_per_second: float
    latency_ms: float
    note: str
    """A problem of the connection, or ""."""


@dataclass(frozen=True)
class Orphan:
    """KV bytes without a user, as found by the control plane's auditor."""

    what: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class FleetMember:
    """One worker or KV service, as of its last heartbeat."""

    id: str
    name: str
    """The worker's --worker-id, where its id is that of its certificate."""
    role: str
    state: str
    suspected: bool
    health: str
    """How requests find the worker: ok, detached, ejected or probation."""
    health_reason: str
    address: str
    model: str
    heartbeat_age_seconds: float
    num_running: int
    num_waiting: int
    num_tokens_in_flight: int
    load_stage: str
    load_progress: float
    error: str
    pool: Pool | None
    arena: Arena | None
    links: tuple[Link, ...]
    orphans: tuple[Orphan, ...]
    memory: Mapping[str, Any]

    @property
    def is_sick(self) -> bool:
        """Whether it says that it is ready, and requests find that it is not."""
        return self.state == "ready" and self.health != "ok"

    @property
    def takes_requests(self) -> bool:
        return self.state == "ready" and not self.suspected and self.health == "ok"

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> FleetMember:
        """Parse one entry of `data`; a missing field becomes 0 or ""."""
        load = entry.get("load") or {}
        return cls(
            id=entry["id"],
            name=entry.get("name") or entry["id"],
            role=entry["role"],
            state=entry.get("state") or "",
            suspected=bool(entry.get("suspected")),
            health=entry.get("health") or "ok",
            health_reason=entry.get("health_reason") or "",
            address=entry.get("address") or "",
            model=entry.get("model") or "",
            heartbeat_age_seconds=float(entry.get("heartbeat_age_seconds") or 0.0),
            num_running=int(load.get("num_running") or 0),
            num_waiting=int(load.get("num_waiting") or 0),
            num_tokens_in_flight=int(load.get("num_tokens_in_flight") or 0),
            load_stage=load.get("load_stage") or "",
            load_progress=float(load.get("load_progress") or 0.0),
            error=load.get("error") or "",
            pool=_pool(entry.get("kv")),
            arena=_arena(entry.get("kv_service")),
            links=_links(entry.get("kv_service")),
            orphans=_orphans(entry.get("orphans") or ()),
            memory=entry.get("memory") or {},
        )


def parse_fleet(document: Mapping[str, Any]) -> list[FleetMember]:
    """Parse the answer of GET /v1/workers; sort by prefill, decode, encode, KV service."""
    order = {"prefill": 0, "decode": 1, "encode": 2, "kv": 3}
    members = [FleetMember.parse(entry) for entry in document["data"]]
    return sorted(members, key=lambda member: (order.get(member.role, 4), member.name, member.id))


def workers_options(connection: Connection) -> dict[str, Any]:
    """Return the arguments of httpx's `build_request` for the fleet."""
    return connection.models_options | {"url": "/v1/workers"}


async def ask(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    """Return the response, or None if there is no answer yet."""
    try:
        return await client.get(path)
    except httpx.TransportError:
        return None


def _pool(kv: Mapping[str, Any] | None) -> Pool | None:
    if not kv or not kv.get("total_blocks"):
        return None
    return Pool(
        total_blocks=int(kv["total_blocks"]),
        free_blocks=int(kv.get("free_blocks") or 0),
        cached_blocks=int(kv.get("cached_blocks") or 0),
        used_blocks=int(kv.get("used_blocks") or 0),
        bytes_per_block=int(kv.get("bytes_per_block") or 0),
    )


def _arena(service: Mapping[str, Any] | None) -> Arena | None:
    if not service:
        return None
    return Arena(
        total_bytes=int(service.get("arena_bytes") or 0),
        free_bytes=int(service.get("arena_free_bytes") or 0),
        num_handles=int(service.get("num_handles") or 0),
        orphan_bytes=int(service.get("orphan_bytes") or 0),
    )


def _orphans(entries: Sequence[Mapping[str, Any]]) -> tuple[Orphan, ...]:
    return tuple(
        Orphan(
            what=entry.get("what") or entry.get("kind") or "",
            num_bytes=int(entry.get("num_bytes") or 0),
            seconds=float(entry.get("seconds") or 0.0),
        )
        for entry in entries
    )


def _links(service: Mapping[str, Any] | None) -> tuple[Link, ...]:
    return tuple(
        Link(
            address=entry.get("address") or "",
            transport=entry.get("transport") or "",
            bytes_per_second=float(entry.get("bytes_per_second") or 0.0),
            latency_ms=float(entry.get("latency_ms") or 0.0),
            note=entry.get("note") or "",
        )
        for entry in (service or {}).get("links") or ()
    )
