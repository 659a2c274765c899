"""Builds the tables of a KV service for the auditor: what the service keeps, and for whom."""

from __future__ import annotations

from kv_transfer_svc.blocks.block import Block
from kv_transfer_svc.handle_record import HandleRecord
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.puller import Pull, Puller
from kv_transfer_svc.region_table import LentRegion
from kv_transfer_svc.store import HandleStore
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1.tables_pb2 import (
    ArenaRow,
    HandleRow,
    LateCopyRow,
    ReaderRow,
    RegionRow,
    StoreLeaseRow,
    TablesReply,
    UnreportedRow,
)
from tandem_runtime.kv.tables import fill


def kv_tables(
    incarnation: str, store: HandleStore, puller: Puller, host_cache: HostCache | None, max_rows: int
) -> TablesReply:
    """Return everything that this service keeps for others, at most `max_rows` of each kind."""
    now = store.clock()
    reply = TablesReply(
        incarnation=incarnation,
        now_unix_ms=_ms(now),
        lease_ms=_ms(store.lease_seconds),
        arena_used_bytes=puller.arena.used_bytes,
    )
    regions = list(store.regions)
    unreported = [each for region in regions for each in _unreported(region)]
    reply.num_left_out = (
        fill(reply.handles, list(store.live()), _handle, max_rows)
        + fill(reply.regions, regions, _region, max_rows)
        + fill(reply.unreported, unreported, _unreported_row, max_rows)
        + fill(reply.arena, puller.pulls(), _arena, max_rows)
    )
    if host_cache is not None:
        reply.num_left_out += _fill_stored(reply, host_cache, now, max_rows)
    return reply


def _fill_stored(reply: TablesReply, cache: HostCache, now: float, max_rows: int) -> int:
    num_left_out = fill(reply.store_leases, cache.blocks.leases(), _store_lease, max_rows)
    return num_left_out + fill(reply.late_copies, cache.blocks.late_copies(now), _late_copy, max_rows)


def _handle(record: HandleRecord) -> HandleRow:
    handle, machine = record.handle, record.machine
    return HandleRow(
        handle_id=handle.handle_id,
        request_id=handle.request_id,
        attempt=handle.attempt,
        owner_incarnation=handle.prefill_incarnation,
        state=machine.state.name,
        num_bytes=record.num_bytes,
        region_id=record.region_id,
        is_copy=record.is_copy,
        lease_until_unix_ms=_ms(machine.lease_until),
        deadline_unix_ms=_ms(machine.deadline),
        readers=[
            ReaderRow(
                reader_id=reader_id, incarnation=record.readers.get(reader_id, ""), lease_until_unix_ms=_ms(until)
            )
            for reader_id, until in machine.leases.items()
        ],
    )


def _region(region: LentRegion) -> RegionRow:
    offer = region.offer
    return RegionRow(
        region_id=offer.region_id,
        owner_incarnation=offer.incarnation,
        num_bytes=region.memory.total_bytes,
        kind=region.memory.kind,
    )


def _unreported(region: LentRegion) -> list[tuple[LentRegion, kv.OwnerEvent.Ended, int]]:
    return [(region, ended, num_bytes) for ended, num_bytes in region.log.unreported()]


def _unreported_row(unreported: tuple[LentRegion, kv.OwnerEvent.Ended, int]) -> UnreportedRow:
    region, ended, num_bytes = unreported
    return UnreportedRow(
        handle_id=ended.handle_id,
        request_id=ended.request_id,
        owner_incarnation=region.offer.incarnation,
        num_bytes=num_bytes,
    )


def _arena(pull: Pull) -> ArenaRow:
    handle = pull.record.handle
    return ArenaRow(
        handle_id=handle.handle_id,
        request_id=handle.request_id,
        num_bytes=pull.num_arena_bytes,
        has_ended=pull.record.machine.ended,
    )


def _store_lease(lease: tuple[str, float, int]) -> StoreLeaseRow:
    reader_id, until, num_bytes = lease
    return StoreLeaseRow(reader_id=reader_id, lease_until_unix_ms=_ms(until), num_bytes=num_bytes)


def _late_copy(block: Block) -> LateCopyRow:
    return LateCopyRow(block=str(block.key), state=block.state.name, num_bytes=block.extent.held_bytes)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
