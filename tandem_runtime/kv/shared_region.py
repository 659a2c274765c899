"""A shared-memory region of KV blocks, with a generation per slot.

    0 ............ blocks or extents ............ generations_offset ... num_slots x uint64 ... end

A region is one memfd: its owner writes, all others map it read-only. A slot's generation grows when the slot is given
up. A reader compares the generation after copying, and so detects that its lease had expired.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct

from tandem.v1 import types_pb2 as pb
from tandem_machine.memfd import memory_file
from tandem_runtime.errors import InvalidRequest, KvCorrupt

_PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named in Python's mmap
_POPULATE_BYTES = 16 << 20
"""Per call: Python holds the interpreter lock in madvise, and this much takes some milliseconds."""
_STEP_BYTES = 4 << 20
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedRegion:
    """A mapped region: `create` for the owner, `map_read_only` for other processes."""

    kind = pb.MEMORY_KIND_HOST

    def __init__(self, fd: int, mapping: mmap.mmap, num_slots: int, generations_offset: int) -> None:
        self._taken_bytes = len(mapping)
        self.fd = fd
        self.num_slots = num_slots
        self.generations_offset = generations_offset
        self._mapping = mapping

    @classmethod
    def create(cls, name: str, num_bytes: int, num_slots: int) -> SharedRegion:
        """Make a memfd of `num_bytes` and a generation table. Allocates its memory now and fixes its size.

        This takes up to a second per GB: a process that serves calls it in a thread.
        """
        generations_offset = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        total_bytes = generations_offset + 8 * num_slots
        fd = memory_file(name)
        try:
            # Taken now: a lack of memory shows here (as an error, or as a kill by the kernel where a cgroup has a
            # limit) and not as a SIGBUS in the middle of a transfer.
            os.posix_fallocate(fd, 0, total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            mapping = mmap.mmap(fd, total_bytes)
        except OSError:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # an older kernel: pages are then mapped at their first use
            for start in range(0, total_bytes, _POPULATE_BYTES):
                mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, total_bytes - start))
        return cls(fd, mapping, num_slots, generations_offset)

    @classmethod
    def reserve(cls, name: str, num_bytes: int, num_slots: int) -> SharedRegion:
        """Make a region as `create` does, whose memory `take` allocates as it is needed."""
        generations_offset = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        fd = memory_file(name)
        try:
            os.ftruncate(fd, generations_offset + 8 * num_slots)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            region = cls(fd, mmap.mmap(fd, generations_offset + 8 * num_slots), num_slots, generations_offset)
        except OSError:
            os.close(fd)
            raise
        region._taken_bytes = 0
        return region

    def take(self, end: int) -> None:
        """Allocate the memory up to `end`, some megabytes ahead. Owner only, before it writes there.

        Raises OSError if memory is short. The first use of each step takes a millisecond or two.
        """
        if end <= self._taken_bytes:
            return
        taken = min(-(-end // _STEP_BYTES) * _STEP_BYTES, self.generations_offset)
        os.posix_fallocate(self.fd, self._taken_bytes, taken - self._taken_bytes)
        self._taken_bytes = taken

    @classmethod
    def map_read_only(cls, fd: int, num_slots: int, generations_offset: int) -> SharedRegion:
        """Map another process's region. Takes ownership of the descriptor, also when it raises InvalidRequest."""
        try:
            fix_size(fd)
            total_bytes = os.fstat(fd).st_size
            has_room = min(num_slots, generations_offset) >= 0 and generations_offset + 8 * num_slots <= total_bytes
            if generations_offset % 8 or not has_room:
                raise InvalidRequest(
                    f"a region of {total_bytes} bytes has no room for {num_slots} generations at {generations_offset}",
                    field="generations_offset",
                )
            mapping = mmap.mmap(fd, total_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # a pipe, a folder, an empty file
            os.close(fd)
            raise InvalidRequest(f"the descriptor of a region cannot be mapped: {error}; lend a memfd") from error
        except InvalidRequest:
            os.close(fd)
            raise
        return cls(fd, mapping, num_slots, generations_offset)

    @property
    def total_bytes(self) -> int:
        return len(self._mapping)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """A view into the region, writable by its owner; release it before `close`."""
        return memoryview(self._mapping)[offset : offset + num_bytes]

    def generation(self, slot: int) -> int:
        value: int = struct.unpack_from("<Q", self._mapping, self.generations_offset + 8 * slot)[0]
        return value

    def next_generation(self, slot: int) -> None:
        """Give up what `slot` holds. Owner only, before anything else is written there."""
        struct.pack_into("<Q", self._mapping, self.generations_offset + 8 * slot, self.generation(slot) + 1)

    def copy_out(self, extent: pb.Extent, start: int, num_bytes: int) -> bytes:
        """Return a copy of part of `extent`; raises KvCorrupt if its slot was given up before the copy was complete."""
        offset = extent.offset + start
        data = self._mapping[offset : offset + num_bytes]
        self.check_generation(extent)
        return data

    def check_generation(self, extent: pb.Extent) -> None:
        """Raise KvCorrupt if the slot was given up since `extent` was sealed; ask after its bytes were read."""
        if self.generation(extent.slot) != extent.generation:
            raise KvCorrupt(
                f"slot {extent.slot} of region {extent.region_id} has generation {self.generation(extent.slot)}, "
                f"sealed was {extent.generation}: it was reused, the reader came past its lease",
                field="generation",
            )

    def close(self) -> None:
        """Unmap the region; while a thread still uses a view, the last view unmaps it. A GB takes some 0.1 s."""
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.fd)


def fix_size(fd: int) -> bool:
    """Seal a memfd's size, so that its owner cannot make readers fault by truncating it. False: it cannot be sealed."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return True
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except OSError:
        return False
    return True
