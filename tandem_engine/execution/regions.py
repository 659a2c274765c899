"""Shares a pool's memory between processes; readers notice slots that were reused while they copied.

An owner's region is a memfd, pre-faulted and sealed against resizing, on huge pages if possible. A reader maps it
read-only, copies, and then compares each slot's generation with the expected one, so it notices a slot that was reused
in between.

Maps are never closed explicitly: a map ends with the last tensor or array made from it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import MutableSequence, Sequence
from typing import cast

import numpy as np

from tandem_engine.errors import RegionError
from tandem_engine.execution.huge_pages import map_read_only, map_shared
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_machine.memfd import memory_file

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class OwnedRegion:
    """Shared memory of `num_bytes` that only this process writes; initially zero."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = memory_file("tandem-kv")
        try:
            self._map = map_shared(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(self.fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "_map"):
            os.close(self.fd)

    def bytes_at(self, offset: int, num_bytes: int) -> Bytes:
        """Return a writable view."""
        return np.frombuffer(self._map, np.uint8, num_bytes, offset)

    def uint64_table(self, offset: int, length: int) -> MutableSequence[int]:
        """Return `length` writable integers at `offset`; items are plain ints, as messages need them."""
        return cast(MutableSequence[int], np.frombuffer(self._map, np.uint64, length, offset).data)


class MappedRegion:
    """A reader's side. The mapping ends with the last view of it."""

    def __init__(self, command: MapRegion, fd: int) -> None:
        """The caller closes `fd`. Raises RegionError if it does not match the command."""
        _check_descriptor(command, fd)
        content = map_read_only(fd, command.num_bytes)
        self._command = command
        self._bytes: Bytes = np.frombuffer(content, np.uint8)
        self._generations = np.frombuffer(content, np.uint64, command.num_slots, command.generations_offset)

    def read(self, extent: ExtentRef) -> Bytes:
        """Return a read-only view of the extent's bytes; raises RegionError."""
        end = extent.offset + extent.num_bytes
        is_inside = 0 <= extent.offset <= end <= self._command.generations_offset
        if not is_inside or not 0 <= extent.slot < self._command.num_slots:
            raise RegionError(
                f"slot {extent.slot}, bytes {extent.offset} to {end}, is outside region {extent.region_id} with "
                f"{self._command.num_slots} slots in {self._command.generations_offset} bytes"
            )
        return self._bytes[extent.offset : end]

    def generations(self, slots: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the generations of slots; raises RegionError for slots outside the region."""
        if slots and not 0 <= min(slots) <= max(slots) < len(self._generations):
            raise RegionError(
                f"slots {min(slots)} to {max(slots)} are not all in region {self._command.region_id} with "
                f"{len(self._generations)} slots"
            )
        return self._generations[slots]


def _check_descriptor(command: MapRegion, fd: int) -> None:
    size = os.fstat(fd).st_size
    table_end = command.generations_offset + 8 * command.num_slots
    if not 0 <= command.generations_offset <= table_end <= command.num_bytes <= size:
        raise RegionError(
            f"region {command.region_id} is {size} bytes long; {command.num_bytes} with a table of generations up to "
            f"{table_end} do not fit"
        )
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise RegionError(
            f"region {command.region_id} is not sealed: its owner could cut it off under its readers; "
            "add F_SEAL_SHRINK to the memfd"
        )
