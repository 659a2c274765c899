"""Tables for tests of the audit: what services would say of one request's hand-over, and of what goes wrong with it."""

from __future__ import annotations

from typing import Any

from control_plane.audit.checks import suspicions
from control_plane.audit.snapshot import AuditedService, Snapshot
from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import (
    HandleRow,
    HoldRow,
    PullRow,
    ReaderRow,
    RegionRow,
    RequestRow,
    TablesReply,
)
from tests.control_plane.scripted_worker import DECODE, PREFILL

NOW = 1_000_000
"""The services' clocks, in milliseconds."""
LATER = NOW + 60_000
KV = pb.WORKER_ROLE_KV
H = b"h" * 16
NAME = f"r/{H.hex()}"


def service(name: str, role: pb.WorkerRole.ValueType, **tables: Any) -> AuditedService:
    info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-life", role=role, address=f"{name}:1")
    reply = TablesReply(incarnation=info.incarnation, now_unix_ms=NOW, lease_ms=10_000, **tables)
    return AuditedService(Worker(info, pb.LoadReport(), 0.0), reply)


def handle(**changes: Any) -> HandleRow:
    fields: dict[str, Any] = {
        "handle_id": H,
        "request_id": "r",
        "owner_incarnation": "prefill-life",
        "state": "LEASED",
        "num_bytes": 100,
        "region_id": "region",
        "lease_until_unix_ms": LATER,
        "deadline_unix_ms": LATER,
        "readers": [ReaderRow(reader_id="r-0", incarnation="decode-life", lease_until_unix_ms=LATER)],
    }
    return HandleRow(**{**fields, **changes})


def hold(**changes: Any) -> HoldRow:
    fields = {"handle_id": H, "request_id": "r", "holder_incarnation": "kv-life", "num_bytes": 100}
    return HoldRow(**{**fields, "deadline_unix_ms": LATER, **changes})


def pull(**changes: Any) -> PullRow:
    return PullRow(**{"handle_id": H, "reader_id": "r-0", "kv_address": "kv:1", "num_bytes": 100, **changes})


def request(request_id: str, **changes: Any) -> RequestRow:
    fields = {"request_id": request_id, "gateway_id": "gateway", "num_bytes": 100, "deadline_unix_ms": LATER}
    return RequestRow(**{**fields, "handle_id": H, **changes})


RUNNING = frozenset({("prefill-life", "r", 0), ("decode-life", "r-0", 0)})


def snapshot(*services: AuditedService, silent: tuple[str, ...] = (), **changes: Any) -> Snapshot:
    answered = {each.incarnation: each for each in services}
    return Snapshot(answered, frozenset(silent), **{"running": RUNNING, "gateway_id": "gateway", **changes})


def one_hand_over(**instead: AuditedService) -> list[AuditedService]:
    """A request between prefill and decode, on which everybody agrees; `instead` replaces services by name."""
    services = {
        "kv": service("kv", KV, handles=[handle()], regions=[RegionRow(owner_incarnation="prefill-life")]),
        "prefill": service("prefill", PREFILL, holds=[hold()], requests=[request("r")]),
        "decode": service("decode", DECODE, pulls=[pull()], requests=[request("r-0")]),
    }
    return list({**services, **instead}.values())


def seen(*services: AuditedService, **changes: Any) -> list[tuple[str, str, str, int]]:
    found = suspicions(snapshot(*services, **changes))
    return sorted((each.kind, each.service, each.name, each.num_bytes) for each in found)
