"""Tracks the memory regions that this service maps, and the events that their owners must receive."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kv_transfer_svc.device_region import LentDeviceRegion, RegionMemory, readable
from kv_transfer_svc.handle_record import Broadcast
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, KvNotFound, StaleIncarnation, Unavailable
from tandem_runtime.kv.packets import close_all
from tandem_runtime.kv.regions import RegionGrant, RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MAX_GONE = 1024
_KEPT_SECONDS = 60.0


@dataclass
class _Entry:
    number: int
    time: float
    num_bytes: int
    ended: kv.OwnerEvent.Ended


class OwnerLog:
    """The ended handles of one region, in order.

    An entry is kept for 60 s after it was sent, since a sent message may not have been received. An owner that
    connects again receives every kept entry.
    """

    def __init__(self) -> None:
        self.changed = Broadcast()
        self._entries: deque[_Entry] = deque()
        self._next_number = 0
        self._next_unsent = 0

    def append(self, ended: kv.OwnerEvent.Ended, num_bytes: int, now: float) -> None:
        self._entries.append(_Entry(self._next_number, now, num_bytes, ended))
        self._next_number += 1
        self.changed.fire()

    def since(self, number: int) -> Iterator[tuple[int, kv.OwnerEvent.Ended]]:
        """Yield (number, event) from `number` on."""
        return ((entry.number, entry.ended) for entry in list(self._entries) if entry.number >= number)

    def sent(self, number: int) -> None:
        self._next_unsent = max(self._next_unsent, number + 1)

    def prune(self, now: float) -> None:
        while self._entries and self._entries[0].number < self._next_unsent:
            if now - self._entries[0].time < _KEPT_SECONDS:
                return
            self._entries.popleft()

    def unsent_bytes(self, before: float) -> int:
        """Return the bytes of handles that ended before `before` and were not sent to their owner yet."""
        return sum(entry.num_bytes for entry in self._unsent() if entry.time < before)

    def unreported(self) -> list[tuple[kv.OwnerEvent.Ended, int]]:
        """Return the events not sent yet, each with the bytes that the owner still keeps."""
        return [(entry.ended, entry.num_bytes) for entry in self._unsent()]

    def _unsent(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries if entry.number >= self._next_unsent)


@dataclass
class LentRegion:
    """A region that a worker lent to this service."""

    offer: RegionOffer
    memory: RegionMemory
    connection: object
    log: OwnerLog = field(default_factory=OwnerLog)
    is_lost: bool = False
    copied: dict[bytes, kv.OwnerEvent.Copied] = field(default_factory=dict)
    """By handle id, of handles that have not ended: the slabs that all readers have copied."""

    def report_copied(self, copied: kv.OwnerEvent.Copied) -> None:
        """Tell the owner, now and whenever it connects again."""
        self.copied[copied.handle_id] = copied
        self.log.changed.fire()

    def forget_copied(self, handle_id: bytes) -> None:
        self.copied.pop(handle_id, None)


class RegionTable:
    """Regions by id. Calls `on_lost` with each region whose owner died. Implements RegionKeeper."""

    def __init__(self, on_lost: Callable[[RegionOffer], None]) -> None:
        self.on_lent: Callable[[], None] = lambda: None
        """Called after a region was lent."""
        self._on_lost = on_lost
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._lent: dict[str, LentRegion] = {}
        self._own: dict[str, SharedRegion] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __iter__(self) -> Iterator[LentRegion]:
        return iter(list(self._lent.values()))

    def add_own(self, region_id: str, memory: SharedRegion) -> None:
        """Add a region of this service itself, such as the arena."""
        self._own[region_id] = memory

    def take(self, offer: RegionOffer, fd: int, connection: object, memory_fd: int | None = None) -> None:
        known = self._lent.get(offer.region_id)
        if known is not None and known.offer == offer:
            close_all((fd,) if memory_fd is None else (fd, memory_fd))
            known.connection = connection  # the old connection may still be closing
            return
        memory: RegionMemory
        if memory_fd is None:
            memory = SharedRegion.map_read_only(fd, offer.num_slots, offer.generations_offset)
        else:
            memory = LentDeviceRegion(offer, fd, memory_fd)
        if offer.region_id in self._own or offer.bytes_per_slot * offer.num_slots > memory.total_bytes:
            memory.close()
            raise InvalidRequest(
                f"region {offer.region_id}: the name is taken, or the slots reach past the end of the region"
            )
        if known is not None:
            self._lose(known)
        self._lent[offer.region_id] = LentRegion(offer, memory, connection)
        self._gone.pop(offer.incarnation, None)
        self.on_lent()
        log.info(
            "kv_region_lent",
            region_id=offer.region_id,
            num_bytes=memory.total_bytes,
            owner=offer.incarnation,
            kind=offer.kind,
        )

    def owner_gone(self, region_id: str, connection: object) -> None:
        region = self._lent.get(region_id)
        if region is not None and region.connection is connection:
            log.info("kv_region_owner_gone", region_id=region_id, owner=region.offer.incarnation)
            self._lose(region)

    def is_gone(self, incarnation: str) -> bool:
        """Whether a worker that lent a region here has died or disconnected, and will reserve nothing."""
        return incarnation in self._gone

    def grant(self, region_id: str) -> RegionGrant:
        memory = self.region(region_id)
        shared = memory if isinstance(memory, SharedRegion) else memory.generations
        # Opened again: a duplicate of the owner's descriptor would let readers write.
        try:
            fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:  # the reader tries again, or computes the prompt
            raise Unavailable(f"region {region_id} cannot be opened for a reader: {error}") from error
        memory_fd = None if isinstance(memory, SharedRegion) else os.dup(memory.memory_fd)
        return RegionGrant(fd, memory.total_bytes, memory.num_slots, shared.generations_offset, memory_fd)

    def region(self, region_id: str) -> RegionMemory:
        """Return a region; raises KvNotFound if it was not lent here."""
        if region_id in self._own:
            return self._own[region_id]
        return self.lent(region_id).memory

    def memory(self, region_id: str) -> SharedRegion:
        """Return a region to read its bytes; raises KvNotFound, or Unsupported for device memory."""
        return readable(self.region(region_id), region_id)

    def lent(self, region_id: str, incarnation: str = "") -> LentRegion:
        """Return a worker's region; raises KvNotFound, or StaleIncarnation if another incarnation lent the region."""
        region = self._lent.get(region_id)
        if region is None:
            raise KvNotFound(
                f"no region {region_id} here: its worker is gone or has not offered the region yet", field="region_id"
            )
        if incarnation and incarnation != region.offer.incarnation:
            raise StaleIncarnation(
                f"region {region_id} is lent by incarnation {region.offer.incarnation}, not by {incarnation}",
                field="incarnation",
            )
        return region

    def close(self) -> None:
        for region in self:
            self._lose(region)

    def _lose(self, region: LentRegion) -> None:
        del self._lent[region.offer.region_id]
        region.is_lost = True
        self._gone[region.offer.incarnation] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)
        self._on_lost(region.offer)
        region.memory.close()
        region.log.changed.fire()
