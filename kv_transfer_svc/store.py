"""Keeps the KV handles of this service, from reservation to their end.

The store is the only writer of records. It runs on the event loop and does no I/O; a timer calls `sweep`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kv_transfer_svc.handle_record import Broadcast, HandleRecord, handle_name
from kv_transfer_svc.region_table import RegionTable
from kv_transfer_svc.slab_checks import check_slab
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    DeadlineExceeded,
    Draining,
    FingerprintMismatch,
    InvalidRequest,
    KvNotFound,
    Overloaded,
    TandemError,
    Unavailable,
    Unsupported,
)
from tandem_runtime.kv.layout import check_supported, layout_digest
from tandem_runtime.kv.regions import RegionOffer
from tandem_runtime.kv.slabs import first_missing_block
from tandem_runtime.kv.tables import prompt_bytes
from tandem_runtime.kv.time_left import stated_seconds_left
from tandem_runtime.kv_handle import HandleMachine, HandleState

_SWEEP_SLACK_SECONDS = 1.0
"""How late a sweep may be before a handle past its lease counts as orphaned."""

_PRUNE_SECONDS = 10.0

_REMEMBERED_SECONDS = 30.0
"""How long past its deadline an ended handle is remembered. Longer than a message is under way: the time left that a
message states is of its sending, so without the record a late one would open the handle anew."""

_MAX_SECONDS_LEFT = 86_400.0
"""No request lasts longer; bounds what a caller may state."""

_START = time.time() - time.monotonic()


def steady_unix_seconds() -> float:
    """Return seconds since the epoch, unaffected by changes of the machine's clock."""
    return _START + time.monotonic()


class HandleStore:
    """Handles held here, and copies of other services' handles for readers of this host."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = steady_unix_seconds,
        wall_clock: Callable[[], float] | None = None,
        lease_seconds: float = 10.0,
        max_handles: int = 65_536,
    ) -> None:
        """All times are `clock`'s; `wall_clock` judges the deadlines of callers that state no time left."""
        self.clock = clock
        self._wall_clock = wall_clock or clock
        self.lease_seconds = lease_seconds
        self.regions = RegionTable(self._region_lost)
        self.counters: Counter[str] = Counter()
        self.ended = Broadcast()
        self.draining = False
        self._max_handles = max_handles
        self._live: dict[HandleRecord, None] = {}  # in order of arrival
        self._prune_at = 0.0
        self._records: dict[bytes, HandleRecord] = {}
        self._copies: dict[bytes, list[HandleRecord]] = {}

    # -------------------------------------------------------------------------------------------------- look up

    def live(self) -> Iterator[HandleRecord]:
        return iter(list(self._live))

    @property
    def num_live(self) -> int:
        return len(self._live)

    def find(self, handle: pb.KvHandle) -> HandleRecord:
        """Return the record of a handle held here; raises KvNotFound."""
        record = self._records.get(handle.handle_id)
        if record is None:
            raise KvNotFound(f"the {handle_name(handle)} is not known here")
        return record

    def find_or_await(self, handle: pb.KvHandle, seconds_left: float | None = None) -> HandleRecord:
        """Return the record of a handle held here; create the record at the first call for the handle.

        A new record whose prefill worker is known to be dead ends at once: no other event would end its waiting
        readers. `seconds_left`: until the handle's deadline, as the caller states; None: by the wall clocks.
        """
        if seconds_left is not None and seconds_left <= 0:  # also with a record: a repeated call gets the same answer
            raise _past_deadline(handle)
        known = self._records.get(handle.handle_id)
        if known is not None:
            return known
        deadline = self._deadline(handle, seconds_left)
        record = self._records.setdefault(handle.handle_id, self._new_record(handle, deadline, is_copy=False))
        if self.regions.is_gone(handle.prefill_incarnation):
            self._writer_lost(record)
        return record

    def copies(self, handle: pb.KvHandle) -> Sequence[HandleRecord]:
        """Return the copies of another service's handle for readers of this host."""
        return list(self._copies.get(handle.handle_id, ()))

    def add_copy(
        self, handle: pb.KvHandle, region_id: str, layout: pb.KvLayout, seconds_left: float | None = None
    ) -> HandleRecord:
        """Open a record that a pull fills; the record ends with its last reader."""
        record = self._new_record(handle, self._deadline(handle, seconds_left), is_copy=True)
        record.region_id, record.layout = region_id, layout
        record.machine.reserve(self.clock(), region_id, self.lease_seconds)
        self._copies.setdefault(handle.handle_id, []).append(record)
        return record

    # ---------------------------------------------------------------------------------------------------- edges

    def reserve(self, request: kv.ReserveRequest) -> HandleRecord:
        """Reserve a handle for its prefill worker."""
        handle = request.handle
        check_supported(request.layout)
        if handle.layout_digest and handle.layout_digest != layout_digest(request.layout):
            raise FingerprintMismatch(
                f"the {handle_name(handle)} was minted for a KV layout other than its writer's", field="layout_digest"
            )
        if request.lease_ms <= 0:
            raise InvalidRequest(
                f"lease_ms is {request.lease_ms}; give the milliseconds a lease lasts", field="lease_ms"
            )
        self.regions.lent(request.region_id, handle.prefill_incarnation)
        record = self.find_or_await(handle, stated_seconds_left(request))
        is_windowed, lease_seconds = request.max_held_bytes > 0, request.lease_ms / 1000
        if record.machine.reserve(self.clock(), request.region_id, lease_seconds, is_windowed=is_windowed):
            record.region_id = request.region_id
            record.layout = request.layout
            record.max_held_bytes = request.max_held_bytes
            self.counters["handles_reserved"] += 1
            record.changed.fire()
            self._end_if_it_cannot_pass(record)
        return record

    def seal(self, record: HandleRecord, slabs: Sequence[kv.Slab], closed: kv.Closed | None) -> None:
        """Make slabs of a record visible to its readers."""
        self.check_slabs(record, slabs)
        _check_close(slabs, record, closed)
        num_known = len(record.machine.slabs)
        if record.machine.seal(self.clock(), slabs, closed):
            new_slabs = record.machine.slabs[num_known:]
            record.num_bytes += sum(extent.num_bytes for slab in new_slabs for extent in slab.extents)
            self.counters["slabs_sealed"] += len(new_slabs)
            self.counters["handles_sealed"] += closed is not None
            record.changed.fire()

    def freed(self, record: HandleRecord, num_bytes: int) -> None:
        """Count off bytes of a copy that its readers have copied and that are freed."""
        record.num_bytes -= num_bytes

    def check_slabs(self, record: HandleRecord, slabs: Sequence[kv.Slab]) -> None:
        """Raise InvalidRequest unless the slabs match the reservation; skip a record without a reservation."""
        if slabs and record.layout is not None and not record.machine.ended:
            memory = self.regions.region(record.region_id)
            for slab in slabs:
                check_slab(slab, record.layout, record.region_id, memory)

    def lease(self, record: HandleRecord, reader_id: str) -> None:
        record.machine.lease(self.clock(), reader_id, self.lease_seconds)

    def watched(self, record: HandleRecord, reader_id: str, *, acknowledges: bool) -> None:
        """Note that a reader watches; raises KvNotFound for a new one if slots of the handle are used again already."""
        record.has_silent_reader = record.has_silent_reader or not acknowledges
        if record.copied.num_by_all and reader_id not in record.readers:
            raise KvNotFound(
                f"the first {record.copied.num_by_all} slabs of the {handle_name(record.handle)} were copied by its "
                "readers, and their memory is used again"
            )
        self._end_if_it_cannot_pass(record)

    def acknowledge(self, record: HandleRecord, reader_id: str, num_slabs: int, followers: Sequence[str]) -> None:
        """Note the leading slabs that a reader has copied, for itself and for `followers`, and tell the owner.

        The followers get a lease, as if they watched.
        """
        if record.machine.ended:
            return
        for follower in followers:
            with suppress(KvNotFound, Overloaded):  # it has released meanwhile
                self.lease(record, follower)
        record.copied.follow(reader_id, followers)
        record.copied.copied(reader_id, num_slabs)
        self._report_copied(record)

    def skipped(self, record: HandleRecord, reader_id: str, index: int) -> None:
        """Note that a reader does not need a slab."""
        record.copied.skipped(reader_id, index)
        self._report_copied(record)

    def release(self, record: HandleRecord, reader_id: str | None) -> None:
        """End one reader's use, or with None every use of the handle."""
        if reader_id is None:
            record.machine.release_all()
        else:
            record.machine.release(reader_id)
        self._settle(record)
        self._report_copied(record)

    def drain(self) -> None:
        """Accept no new handles, and abort those not reserved yet: no writer will reserve them."""
        self.draining = True
        for record in self.live():
            if record.machine.state is HandleState.AWAITED:
                self.abort(record, Draining("this KV service is draining and takes no new handles"))

    def abort(self, record: HandleRecord, reason: TandemError) -> None:
        record.machine.abort(reason)
        self._settle(record)

    def sweep(self) -> None:
        """Expire leases and handles; forget handles past their deadline."""
        now = self.clock()
        for record in self.live():
            for reader_id, num_streams in record.watching.items():
                if num_streams and record.machine.is_reader(reader_id):
                    record.machine.lease(now, reader_id, self.lease_seconds)
            record.machine.expire(now)
            self._settle(record)
            self._report_copied(record)  # a reader may be lost that the others waited for
        if now >= self._prune_at:
            self._prune(now)

    # -------------------------------------------------------------------------------------------------- stats

    @property
    def leased_bytes(self) -> int:
        return sum(record.num_bytes for record in self.live())

    @property
    def orphan_bytes(self) -> int:
        """Bytes kept without a right: past their lease, or of an ended handle whose owner was not notified."""
        now = self.clock()
        late = sum(r.num_bytes for r in self.live() if r.machine.lease_until < now - _SWEEP_SLACK_SECONDS)
        return late + sum(region.log.unsent_bytes(now - self.lease_seconds) for region in self.regions)

    # ------------------------------------------------------------------------------------------------- helpers

    def _prune(self, now: float) -> None:
        """Forget handles that ended, some time past their deadline: a late call states the time left at its sending."""
        self._prune_at = now + _PRUNE_SECONDS
        self._records = {
            handle_id: record
            for handle_id, record in self._records.items()
            if not record.machine.ended or now <= record.machine.deadline + _REMEMBERED_SECONDS
        }
        for region in self.regions:
            region.log.prune(now)

    def _new_record(self, handle: pb.KvHandle, deadline: float, *, is_copy: bool) -> HandleRecord:
        machine = HandleMachine(handle_name(handle), handle.num_readers, deadline, reader_bound=is_copy)
        record = HandleRecord(handle, machine, is_copy)
        self._live[record] = None
        return record

    def _deadline(self, handle: pb.KvHandle, seconds_left: float | None) -> float:
        """Return the deadline of a new record, by the clock; refuse a record that cannot be opened."""
        if self.draining:
            raise Draining("this KV service is draining and takes no new handles")
        if len(handle.handle_id) != 16:
            raise InvalidRequest(f"a handle id has 16 bytes, not {len(handle.handle_id)}", field="handle_id")
        if seconds_left is None:
            seconds_left = handle.deadline_unix_ms / 1000 - self._wall_clock()
        if seconds_left <= 0:
            raise _past_deadline(handle)
        if len(self._live) >= self._max_handles:
            raise Overloaded(f"{self._max_handles} KV handles are kept already", retry_after_seconds=1.0)
        return self.clock() + min(seconds_left, _MAX_SECONDS_LEFT)

    def _settle(self, record: HandleRecord) -> None:
        """Finish a record that has ended, once: count the end, notify owner and readers."""
        if not record.machine.ended or record not in self._live:
            return
        del self._live[record]
        record.checksums.clear()
        state = record.machine.state
        self.counters[f"handles_{state.name.lower()}"] += 1
        if record in self._copies.get(record.handle.handle_id, ()):
            self._drop_copy(record)
        elif record.region_id:
            self._notify_owner(record, state)
        record.changed.fire()
        self.ended.fire()

    def _drop_copy(self, record: HandleRecord) -> None:
        """Forget a copy; a later reader starts a new pull."""
        copies = self._copies[record.handle.handle_id]
        copies.remove(record)
        if not copies:
            del self._copies[record.handle.handle_id]

    def _report_copied(self, record: HandleRecord) -> None:
        """Tell the owner which leading slabs all readers have copied, if it needs their slots and these are more."""
        machine, copied = record.machine, record.copied
        if not record.max_held_bytes or machine.ended:
            return
        num_before = copied.num_by_all
        if not copied.update(machine.leases, machine.num_released, machine.num_readers):
            return
        slabs = machine.slabs[num_before : copied.num_by_all]
        self.freed(record, sum(extent.num_bytes for slab in slabs for extent in slab.extents))
        handle_id = record.handle.handle_id
        self.regions.lent(record.region_id).report_copied(
            kv.OwnerEvent.Copied(handle_id=handle_id, num_slabs=copied.num_by_all)
        )

    def _end_if_it_cannot_pass(self, record: HandleRecord) -> None:
        """Abort a handle that its writer's region cannot hold at once, and whose readers say nothing of their copies.

        They would wait until its deadline.
        """
        if not record.max_held_bytes or not record.has_silent_reader or record.layout is None:
            return
        num_bytes = prompt_bytes(record.layout, record.handle.num_tokens)
        if num_bytes > record.max_held_bytes:
            self.abort(
                record,
                Unsupported(
                    f"the {handle_name(record.handle)} has {num_bytes:,} bytes, its prefill worker shows "
                    f"{record.max_held_bytes:,} at once, and a reader of release 0.2 does not say what it has copied: "
                    "update the decode worker and the KV service of its host, or raise --kv-staging-bytes"
                ),
            )

    def _notify_owner(self, record: HandleRecord, state: HandleState) -> None:
        try:
            region = self.regions.lent(record.region_id)
        except KvNotFound:  # the owner is dead
            return
        handle = record.handle
        region.forget_copied(handle.handle_id)
        ended = kv.OwnerEvent.Ended(handle_id=handle.handle_id, request_id=handle.request_id, state=state.to_proto)
        region.log.append(ended, record.num_bytes, self.clock())

    def _region_lost(self, lost: RegionOffer) -> None:
        """Abort the handles that the dead owner was filling or had still to reserve."""
        for record in self.live():
            is_awaited = record.machine.state is HandleState.AWAITED
            if record.region_id == lost.region_id or (
                is_awaited and record.handle.prefill_incarnation == lost.incarnation
            ):
                self._writer_lost(record)

    def _writer_lost(self, record: HandleRecord) -> None:
        self.abort(record, Unavailable(f"the prefill worker of the {handle_name(record.handle)} is gone"))


def _past_deadline(handle: pb.KvHandle) -> DeadlineExceeded:
    return DeadlineExceeded(f"the {handle_name(handle)} is past its deadline", field="deadline_unix_ms")


def _check_close(slabs: Sequence[kv.Slab], record: HandleRecord, closed: kv.Closed | None) -> None:
    """Raise InvalidRequest unless a closed handle has all its blocks sealed, and no others."""
    if closed is None or record.layout is None or record.machine.ended or record.machine.closed is not None:
        return
    name, num_blocks = handle_name(record.handle), closed.num_blocks
    all_slabs = [*record.machine.slabs, *slabs]
    end = max((slab.first_block + slab.num_blocks for slab in all_slabs), default=0)
    if end > num_blocks:
        raise InvalidRequest(f"the {name} is closed with {num_blocks} blocks, a slab reaches {end}", field="num_blocks")
    # A copy begins where the blocks that its readers already have end.
    first_block = min((slab.first_block for slab in all_slabs), default=num_blocks) if record.is_copy else 0
    missing = first_missing_block(all_slabs, record.layout, record.handle.num_tokens, first_block, num_blocks)
    if missing is not None:
        raise InvalidRequest(f"the {name} is closed with block {missing} of {num_blocks} unsealed", field="num_blocks")
