"""The checks of an audit. Each check compares one process's tables with those of all others.

Checks are in the order of causes: a handle of a prefill worker that is gone is reported as that, not as overdue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from control_plane.audit.snapshot import AuditedService, Snapshot
from control_plane.audit.suspicion import REGION, Suspicion
from tandem.v1.tables_pb2 import HandleRow, HoldRow, ReaderRow, RequestRow

Check = Callable[[AuditedService, Snapshot], Iterator[Suspicion]]
Facts = dict[str, str | int]

KINDS = {
    REGION: "memory of a worker that is gone is still mapped",
    "owner_gone": "a handle whose prefill worker is gone",
    "request_gone": "memory for a request that no dispatcher has",
    "unknown_to_kv": "blocks held for a handle that its KV service does not have",
    "not_held": "a handle whose prefill worker no longer holds its blocks",
    "readers_gone": "a handle whose readers are all gone",
    "overdue": "a handle past its lease",
    "end_undelivered": "an ended handle whose prefill worker was not notified",
    "arena_kept": "arena memory of a pull that has ended",
    "arena_unclaimed": "arena memory that belongs to no pull",
    "pull_without_handle": "a pull from a handle that its KV service does not have",
    "pool_not_empty": "blocks in use in the pool of an idle worker",
    "store_lease_overdue": "stored blocks lent beyond the end of the lease",
    "copy_unfinished": "a stored block that was never filled or never written to disk",
}
"""The meaning of each kind, worded to follow a number of bytes."""


def suspicions(snapshot: Snapshot) -> Iterator[Suspicion]:
    """Yield all present differences. In a busy fleet, most disappear a moment later."""
    for service in snapshot.answered.values():
        for check in _KV_CHECKS if service.is_kv else _WORKER_CHECKS:
            yield from check(service, snapshot)


# ------------------------------------------------------------------------------------------------------- KV services


def _regions(kv: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in kv.tables.regions:
        if not snapshot.is_here(row.owner_incarnation):
            yield _suspicion(REGION, kv, row.region_id, row.num_bytes, place=row.owner_incarnation)


def _handles(kv: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in kv.tables.handles:
        for kind, needs in _faults(row, kv, snapshot):
            yield _suspicion(
                kind,
                kv,
                _name(row.request_id, row.handle_id),
                row.num_bytes,
                place=kv.incarnation if row.is_copy else row.owner_incarnation,
                needs=needs,
                facts=_history(row),
            )


def _faults(row: HandleRow, kv: AuditedService, snapshot: Snapshot) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what is wrong with a handle, and the incarnations whose answers prove it."""
    if not snapshot.is_here(row.owner_incarnation):
        yield "owner_gone", frozenset()
    if not snapshot.wants(row.request_id, row.deadline_unix_ms, kv.tables.now_unix_ms):
        yield "request_gone", frozenset()
    owner = snapshot.answered.get(row.owner_incarnation)
    is_filled_there = owner is not None and owner.is_complete and row.region_id and not row.is_copy
    if is_filled_there and owner is not None and row.handle_id not in owner.held:
        yield "not_held", frozenset({row.owner_incarnation})
    if row.state == "LEASED" and all(_is_gone(reader, row.handle_id, snapshot) for reader in row.readers):
        yield "readers_gone", frozenset(reader.incarnation for reader in row.readers)
    if row.lease_until_unix_ms < kv.tables.now_unix_ms:
        yield "overdue", frozenset()


def _is_gone(reader: ReaderRow, handle_id: bytes, snapshot: Snapshot) -> bool:
    """Return whether a reader is dead or does not have the handle. A reader without a name is assumed alive."""
    if not reader.incarnation:
        return False
    who = snapshot.answered.get(reader.incarnation)
    if who is None:
        return not snapshot.is_here(reader.incarnation)
    if not who.is_complete:
        return False
    return handle_id not in who.handles if who.is_kv else (handle_id, reader.reader_id) not in who.pulled


def _undelivered_ends(kv: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in kv.tables.unreported:
        name = _name(row.request_id, row.handle_id)
        yield _suspicion("end_undelivered", kv, name, row.num_bytes, place=row.owner_incarnation)


def _arena(kv: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in kv.tables.arena:
        if row.has_ended and row.num_bytes:
            yield _suspicion("arena_kept", kv, _name(row.request_id, row.handle_id), row.num_bytes)
    unclaimed = kv.tables.arena_used_bytes - sum(row.num_bytes for row in kv.tables.arena)
    if unclaimed > 0 and kv.is_complete:
        yield _suspicion("arena_unclaimed", kv, "arena", unclaimed)


def _store(kv: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for lease in kv.tables.store_leases:
        if lease.lease_until_unix_ms < kv.tables.now_unix_ms:
            yield _suspicion("store_lease_overdue", kv, lease.reader_id, lease.num_bytes)
    for copy in kv.tables.late_copies:
        yield _suspicion("copy_unfinished", kv, copy.block, copy.num_bytes, facts={"state": copy.state})


# ----------------------------------------------------------------------------------------------------------- workers


def _holds(worker: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in worker.tables.holds:
        name = _name(row.request_id, row.handle_id)
        facts: Facts = {"attempt": row.attempt, "holder": row.holder_incarnation}
        if not snapshot.wants(row.request_id, row.deadline_unix_ms, worker.tables.now_unix_ms):
            yield _suspicion("request_gone", worker, name, row.num_bytes, facts=facts)
        if _is_unknown(row, snapshot):
            needs = frozenset({row.holder_incarnation})
            yield _suspicion("unknown_to_kv", worker, name, row.num_bytes, needs=needs, facts=facts)


def _is_unknown(row: HoldRow, snapshot: Snapshot) -> bool:
    holder = snapshot.answered.get(row.holder_incarnation)
    if holder is None:
        return bool(row.holder_incarnation) and not snapshot.is_here(row.holder_incarnation)
    return holder.is_complete and row.handle_id not in holder.handles


def _requests(worker: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in worker.tables.requests:
        if not _is_wanted(row, worker, snapshot):
            facts: Facts = {"attempt": row.attempt, "gateway": row.gateway_id}
            name = _name(row.request_id, row.handle_id) if row.handle_id else f"{row.request_id}.{row.attempt}"
            yield _suspicion("request_gone", worker, name, row.num_bytes, facts=facts)


def _is_wanted(row: RequestRow, worker: AuditedService, snapshot: Snapshot) -> bool:
    if row.deadline_unix_ms < worker.tables.now_unix_ms:
        return False
    is_ours = row.gateway_id == snapshot.gateway_id
    return not is_ours or (worker.incarnation, row.request_id, row.attempt) in snapshot.running


def _pulls(worker: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    for row in worker.tables.pulls:
        kv = snapshot.at(row.kv_address)
        if kv is not None and kv.is_complete and row.handle_id not in kv.handles:
            name = _name(row.reader_id, row.handle_id)
            needs = frozenset({kv.incarnation})
            yield _suspicion("pull_without_handle", worker, name, row.num_bytes, needs=needs)


def _pool(worker: AuditedService, snapshot: Snapshot) -> Iterator[Suspicion]:
    """Suspect blocks in use while the worker is idle. A pool lags behind the tables, but not for long."""
    tables = worker.tables
    is_idle = not (tables.requests or tables.holds or tables.pulls)
    if is_idle and tables.pool.num_used_blocks:
        num_bytes = tables.pool.num_used_blocks * tables.pool.bytes_per_block
        yield _suspicion("pool_not_empty", worker, f"pool after {tables.num_requests_so_far} requests", num_bytes)


_KV_CHECKS: tuple[Check, ...] = (_regions, _handles, _undelivered_ends, _arena, _store)
_WORKER_CHECKS: tuple[Check, ...] = (_holds, _requests, _pulls, _pool)


def _suspicion(
    kind: str,
    service: AuditedService,
    name: str,
    num_bytes: int,
    *,
    place: str = "",
    needs: frozenset[str] = frozenset(),
    facts: Facts | None = None,
) -> Suspicion:
    return Suspicion(
        kind,
        service.worker.worker_id,
        service.incarnation,
        place or service.incarnation,
        name,
        num_bytes,
        needs | {service.incarnation},
        facts or {},
    )


def _name(request_id: str, handle_id: bytes) -> str:
    return f"{request_id}/{handle_id.hex()}"


def _history(row: HandleRow) -> Facts:
    return {
        "attempt": row.attempt,
        "state": row.state,
        "owner": row.owner_incarnation,
        "readers": ", ".join(f"{reader.reader_id} at {reader.incarnation or 'unknown'}" for reader in row.readers),
        "deadline_unix_ms": row.deadline_unix_ms,
    }
