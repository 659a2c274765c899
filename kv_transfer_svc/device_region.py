"""Keeps a worker's region in device memory: passes its memory on and checks its slots, and never reads its bytes."""

from __future__ import annotations

import os

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest, Unsupported
from tandem_runtime.kv.regions import RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion


class LentDeviceRegion:
    """The descriptor of device memory, and the generations of its slots."""

    kind = pb.MEMORY_KIND_DEVICE

    def __init__(self, offer: RegionOffer, fd: int, memory_fd: int) -> None:
        """Take ownership of the descriptors of generations and memory, also when it raises InvalidRequest.

        The driver's descriptors have no size, so `offer.num_bytes` is the owner's word.
        """
        try:
            self.generations = SharedRegion.map_read_only(fd, offer.num_slots, offer.generations_offset)
        except InvalidRequest:
            os.close(memory_fd)
            raise
        self.memory_fd = memory_fd
        self.num_slots, self.total_bytes = offer.num_slots, offer.num_bytes

    def generation(self, slot: int) -> int:
        return self.generations.generation(slot)

    def close(self) -> None:
        """Give up the memory: the driver frees it with its last mapping or descriptor."""
        self.generations.close()
        os.close(self.memory_fd)


RegionMemory = SharedRegion | LentDeviceRegion


def readable(memory: RegionMemory, region_id: str) -> SharedRegion:
    """Return memory whose bytes this service may read; raises Unsupported for memory of a device."""
    if isinstance(memory, SharedRegion):
        return memory
    raise Unsupported(
        f"region {region_id} is in MEMORY_KIND_DEVICE, which only engines of its host read: for workers of other "
        "hosts, for --kv-transport grpc and for the store, start the prefill worker with --kv-region host",
        field="region_id",
    )
