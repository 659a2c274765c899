"""Which regions does this service hold, and who lent them?"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kv_transfer_svc.owner_log import OwnerLog
from tandem_runtime.errors import InvalidRequest, KvNotFound, StaleIncarnation
from tandem_runtime.kv.regions import RegionGrant, RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MAX_GONE = 1024


@dataclass
class LentRegion:
    offer: RegionOffer
    memory: SharedRegion
    connection: object
    log: OwnerLog = field(default_factory=OwnerLog)
    is_lost: bool = False


class RegionTable:
    """Regions by id; `on_lost` is told what was lent by an owner that is dead. Implements RegionKeeper."""

    def __init__(self, on_lost: Callable[[RegionOffer], None]) -> None:
        self._on_lost = on_lost
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._lent: dict[str, LentRegion] = {}
        self._own: dict[str, SharedRegion] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __iter__(self) -> Iterator[LentRegion]:
        return iter(list(self._lent.values()))

    def add_own(self, region_id: str, memory: SharedRegion) -> None:
        """Hand out a region of this service itself (the arena)."""
        self._own[region_id] = memory

    def take(self, offer: RegionOffer, fd: int, connection: object) -> None:
        known = self._lent.get(offer.region_id)
        if known is not None and known.offer == offer:
            os.close(fd)
            known.connection = connection  # its old connection may still be ending
            return
        memory = SharedRegion.map_read_only(fd, offer.num_slots, offer.generations_offset)
        if offer.region_id in self._own or offer.bytes_per_slot * offer.num_slots > memory.total_bytes:
            memory.close()
            raise InvalidRequest(f"region {offer.region_id}: its name is taken, or its slots reach past its end")
        if known is not None:
            self._lose(known)
        self._lent[offer.region_id] = LentRegion(offer, memory, connection)
        self._gone.pop(offer.incarnation, None)
        log.info("kv_region_lent", region_id=offer.region_id, num_bytes=memory.total_bytes, owner=offer.incarnation)

    def owner_gone(self, region_id: str, connection: object) -> None:
        region = self._lent.get(region_id)
        if region is not None and region.connection is connection:
            log.info("kv_region_owner_gone", region_id=region_id, owner=region.offer.incarnation)
            self._lose(region)

    def is_gone(self, incarnation: str) -> bool:
        """Whether a worker has lent a region here and is dead, or has hung up: it will reserve nothing."""
        return incarnation in self._gone

    def grant(self, region_id: str) -> RegionGrant:
        memory = self.memory(region_id)
        # Opened anew, since a duplicate of the owner's descriptor would let readers write.
        fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return RegionGrant(fd, memory.total_bytes, memory.num_slots, memory.generations_offset)

    def memory(self, region_id: str) -> SharedRegion:
        """Return a mapped region; raises KvNotFound if it is not, or no longer, held."""
        if region_id in self._own:
            return self._own[region_id]
        return self.lent(region_id).memory

    def lent(self, region_id: str, incarnation: str = "") -> LentRegion:
        """Return a worker's region; raises KvNotFound, or StaleIncarnation if another life of the worker lent it."""
        region = self._lent.get(region_id)
        if region is None:
            raise KvNotFound(
                f"no region {region_id} here: its worker is gone or has yet to offer it", field="region_id"
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
