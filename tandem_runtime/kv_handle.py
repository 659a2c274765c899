r"""The state machine of a KV handle.

    AWAITED ----> RESERVED -> FILLING -> SEALED <-> LEASED(n) -> RELEASED
       \_____________\__________\___________\__________\-----> RELEASED | ABORTED | EXPIRED

    edge        needs                         changes
    reserve     AWAITED                       -> RESERVED; starts the writer's lease
    seal        RESERVED, FILLING             -> FILLING, with `closed` -> SEALED; renews the writer's lease
    lease       any that has not ended        a reader's lease is opened or extended (watch, renew)
    renew       RESERVED, FILLING             the writer's lease is extended
    release     any that has not ended        a reader is done; -> RELEASED with the last one expected
    release_all any that has not ended        -> RELEASED
    abort       any that has not ended        -> ABORTED, for a reason that every later caller receives
    expire      the clock                     lapsed readers are dropped; -> EXPIRED past the lease or the deadline

AWAITED is a handle that a reader or a release named before its writer reserved it.

Lifetime: until the handle is closed, the writer's lease; afterwards, the last lease of its readers; never past the
deadline. A handle that was never reserved lives by the last lease of its readers, because its writer may be dead.
One that is filled in windows lives by both: without a reader its writer would wait, and hold memory, for ever.

All edges are idempotent. A late call changes nothing: it gets the error that says why, or no error if the call only
ended the handle.

The machine does no I/O and reads no clock: times are arguments, in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvNotFound,
    Overloaded,
    StaleIncarnation,
    TandemError,
)


class HandleState(IntEnum):
    """The states, numbered as in `kv_transfer.proto`."""

    AWAITED = kv.HANDLE_STATE_UNSPECIFIED
    RESERVED = kv.HANDLE_STATE_RESERVED
    FILLING = kv.HANDLE_STATE_FILLING
    SEALED = kv.HANDLE_STATE_SEALED
    LEASED = kv.HANDLE_STATE_LEASED
    RELEASED = kv.HANDLE_STATE_RELEASED
    ABORTED = kv.HANDLE_STATE_ABORTED
    EXPIRED = kv.HANDLE_STATE_EXPIRED

    @property
    def to_proto(self) -> kv.HandleState.ValueType:
        return kv.HandleState.ValueType(int(self))

    @classmethod
    def of(cls, number: int) -> HandleState | None:
        """Return the state with this number; None for a state of a newer version."""
        return cls(number) if number in cls._value2member_map_ else None


_LEASES_WITHOUT_READER = 2
"""Of its writer: readers of a handle that is filled in windows come within so many, told of the handle when it is."""

_ENDED = frozenset({HandleState.RELEASED, HandleState.ABORTED, HandleState.EXPIRED})


class HandleMachine:
    """One handle. Owned by the store of one KV service; others read its properties.

    `reader_bound` handles are copies for the readers of one host. They end with the last reader that came, whatever
    `num_readers` the original expects.
    """

    def __init__(self, name: str, num_readers: int, deadline: float, *, reader_bound: bool = False) -> None:
        self.name = name
        self.num_readers = max(1, num_readers)
        self.deadline = deadline
        self.slabs: list[kv.Slab] = []
        self.closed: kv.Closed | None = None
        self.end_error: TandemError | None = None
        self._reader_bound = reader_bound
        self._phase = HandleState.AWAITED
        self._writer = ""
        self._writer_lease_seconds = 0.0
        self._writer_until = deadline
        self._is_windowed = False
        self._leases: dict[str, float] = {}
        self._released: set[str] = set()
        self._had_reader = False
        self._readers_until = 0.0

    # ------------------------------------------------------------------------------------------- what is known

    @property
    def state(self) -> HandleState:
        return HandleState.LEASED if self._phase is HandleState.SEALED and self._leases else self._phase

    @property
    def ended(self) -> bool:
        return self._phase in _ENDED

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_released(self) -> int:
        """Readers that need nothing more."""
        return len(self._released)

    @property
    def leases(self) -> dict[str, float]:
        """The end of each reader's lease."""
        return dict(self._leases)

    def is_reader(self, reader_id: str) -> bool:
        """Return whether the reader holds a lease now."""
        return reader_id in self._leases

    @property
    def lease_until(self) -> float:
        """The time at which the handle ends without a renewal; see "Lifetime" above."""
        if self.closed is not None:
            return min(self.deadline, max([self._writer_until, *self._leases.values()]))
        if self._awaits_readers:
            return min(self.deadline, self._writer_until, max([self._readers_until, *self._leases.values()]))
        return min(self.deadline, self._writer_until)

    @property
    def _awaits_readers(self) -> bool:
        """Whether the writer waits until readers have copied what it has sealed."""
        return self._is_windowed and self._phase in (HandleState.RESERVED, HandleState.FILLING)

    # ---------------------------------------------------------------------------------------------- the writer

    def reserve(self, now: float, writer: str, lease_seconds: float, *, is_windowed: bool = False) -> bool:
        """AWAITED -> RESERVED. False: `writer` has reserved it already. Raises StaleIncarnation for another writer.

        `is_windowed`: the writer holds a part of the prompt at once, and reuses its memory once that part was copied.
        """
        self._refuse_if_ended()
        if self._phase is not HandleState.AWAITED:
            if writer != self._writer:
                raise StaleIncarnation(f"{self.name} is reserved by {self._writer}, not by {writer}", field="region_id")
            return False
        self._phase = HandleState.RESERVED
        self._writer = writer
        self._is_windowed = is_windowed
        self._writer_lease_seconds = lease_seconds
        self._writer_until = now + lease_seconds
        if is_windowed:
            self._readers_until = max(self._readers_until, now + _LEASES_WITHOUT_READER * lease_seconds)
        return True

    def seal(self, now: float, slabs: Sequence[kv.Slab], closed: kv.Closed | None = None) -> bool:
        """RESERVED | FILLING -> FILLING, or SEALED with `closed`. False: all of it was sealed before.

        A slab is sealed once: the same index again must be the same slab. Raises InvalidRequest for a slab that
        differs, leaves a gap or comes after the close. Raises the handle's end if it has ended.
        """
        self._refuse_if_ended()
        if self._phase is HandleState.AWAITED:
            raise KvNotFound(f"{self.name} is not reserved: reserve it before sealing")
        new_slabs = self._new_slabs(slabs)
        is_closing = closed is not None and self._is_new_close(closed)
        if self.closed is not None and new_slabs:
            raise InvalidRequest(f"{self.name} is closed with {len(self.slabs)} slabs: no slab can follow")
        if self.closed is None:
            self._writer_until = now + self._writer_lease_seconds
        if not new_slabs and not is_closing:
            return False
        self.slabs += new_slabs
        self._phase = HandleState.FILLING
        if is_closing:
            self.closed = closed
            self._phase = HandleState.SEALED
        return True

    def renew_writer(self, now: float) -> None:
        """Extend the writer's lease. No effect on a closed handle, which lives by its readers' leases."""
        if self._phase in (HandleState.RESERVED, HandleState.FILLING):
            self._writer_until = max(self._writer_until, now + self._writer_lease_seconds)

    # --------------------------------------------------------------------------------------------- the readers

    def lease(self, now: float, reader_id: str, seconds: float) -> None:
        """Open or extend a reader's lease.

        Raises KvNotFound for a reader that has released, Overloaded for one too many. The limit is twice the number of
        readers, because the lease of a reader that died and was replaced has yet to expire.
        """
        self._refuse_if_ended()
        if reader_id in self._released:
            raise KvNotFound(f"{self.name}: reader {reader_id} has released it", field="reader_id")
        if reader_id not in self._leases and len(self._leases) >= 2 * self.num_readers:
            raise Overloaded(f"{self.name} expects {self.num_readers} readers and has {len(self._leases)}")
        self._leases[reader_id] = max(self._leases.get(reader_id, 0.0), now + seconds)
        self._readers_until = max(self._readers_until, now + seconds)
        self._had_reader = True

    def release(self, reader_id: str) -> bool:
        """Release a reader, present or expected; the last expected one ends the handle. False: nothing changed."""
        if self.ended or reader_id in self._released:
            return False
        self._leases.pop(reader_id, None)
        self._released.add(reader_id)
        is_last = len(self._released) >= self.num_readers or (self._reader_bound and not self._leases)
        if is_last:
            self._end(HandleState.RELEASED, KvNotFound(f"{self.name} was released by all its readers"))
        return True

    # --------------------------------------------------------------------------------------------------- ends

    def release_all(self) -> bool:
        """End the handle for all readers. False: it had ended."""
        return self._end(HandleState.RELEASED, KvNotFound(f"{self.name} was released: nobody needs it any more"))

    def abort(self, reason: TandemError) -> bool:
        """End the handle unfilled; every later caller receives `reason`. False: it had ended."""
        return self._end(HandleState.ABORTED, reason)

    def expire(self, now: float) -> bool:
        """Drop lapsed readers, and end a handle past its lease or deadline. True: it ended now."""
        if self.ended:
            return False
        self._leases = {reader_id: until for reader_id, until in self._leases.items() if until > now}
        if now >= self.deadline:
            return self._end(HandleState.EXPIRED, DeadlineExceeded(f"{self.name}: the request's deadline has passed"))
        if self._reader_bound and self._had_reader and not self._leases:
            return self._end(HandleState.EXPIRED, KvNotFound(f"{self.name}: the leases of its readers ran out"))
        if self._phase is HandleState.AWAITED and self._had_reader and now >= self._readers_until:
            return self._end(HandleState.EXPIRED, KvNotFound(f"{self.name}: its readers left before it was reserved"))
        if now < self.lease_until:
            return False
        return self._end(HandleState.EXPIRED, KvNotFound(self._lapse(now)))

    def _lapse(self, now: float) -> str:
        if self.closed is not None:
            return f"{self.name}: no reader renewed its lease"
        if self._awaits_readers and now < self._writer_until:
            return f"{self.name}: its writer waits for readers and has none"
        return f"{self.name}: its writer neither sealed nor renewed for {self._writer_lease_seconds:g} s"

    def _end(self, state: HandleState, error: TandemError) -> bool:
        if self.ended:
            return False
        self._phase = state
        self.end_error = error
        self._leases.clear()
        self.slabs = []
        return True

    # ------------------------------------------------------------------------------------------------- refusals

    def _refuse_if_ended(self) -> None:
        if self.end_error is not None:
            raise type(self.end_error)(self.end_error.message, field=self.end_error.field)

    def _new_slabs(self, slabs: Sequence[kv.Slab]) -> list[kv.Slab]:
        known = list(self.slabs)
        for slab in slabs:
            if slab.index > len(known):
                raise InvalidRequest(f"{self.name}: slab {slab.index} leaves a gap after slab {len(known) - 1}")
            if slab.index == len(known):
                known.append(slab)
            elif known[slab.index] != slab:
                raise InvalidRequest(f"{self.name}: slab {slab.index} is sealed and cannot change")
        return known[len(self.slabs) :]

    def _is_new_close(self, closed: kv.Closed) -> bool:
        if self.closed is None:
            return True
        if self.closed.num_blocks != closed.num_blocks:
            raise InvalidRequest(f"{self.name} is closed with {self.closed.num_blocks} blocks and cannot change")
        return False
