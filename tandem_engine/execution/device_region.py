"""Shares a pool in device memory between processes of one host, by file descriptor.

    generations  uint64 [num_slots]                 a memfd of its own: all processes read it, the owner writes it
    memory       [num_slots, bytes_per_slot]        device memory (`cuda_vmm`), its descriptor passed on unread

The laws are those of a region in host memory (`regions`): a reader copies, then compares each slot's generation, so it
notices a slot that was reused meanwhile. The descriptor would let a reader write; nobody but the owner does.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tandem_engine.errors import RegionError
from tandem_engine.execution.cuda_vmm import Driver, DriverError
from tandem_engine.execution.huge_pages import map_read_only
from tandem_engine.execution.regions import Bytes, OwnedRegion
from tandem_engine.messages import ExtentRef, MapRegion

_GENERATION_BYTES = 8


class DeviceRegion:
    """The owner's side: device memory for `num_slots` slots, and their generations."""

    def __init__(self, driver: Driver, num_slots: int, bytes_per_slot: int) -> None:
        """Raises DriverError, OSError."""
        self.driver = driver
        self.num_bytes = num_slots * bytes_per_slot
        self.memory = driver.create(self.num_bytes)
        self._table = OwnedRegion(num_slots * _GENERATION_BYTES)
        self.generations = self._table.uint64_table(0, num_slots)

    @property
    def fds(self) -> tuple[int, int]:
        """Descriptors of the generations and of the memory; this object closes them."""
        return self._table.fd, self.memory.fd


class MappedDeviceRegion:
    """A reader's side. The mapping ends with the last reference to this object."""

    def __init__(self, command: MapRegion, generations_fd: int, memory_fd: int, driver: Driver) -> None:
        """Map both parts; the caller closes the descriptors. Raises RegionError if they do not fit the command."""
        _check_generations(command, generations_fd)
        self._command = command
        table = map_read_only(generations_fd, command.num_slots * _GENERATION_BYTES)
        self._generations = np.frombuffer(table, np.uint64, command.num_slots)
        try:
            self._memory = driver.import_(memory_fd, command.num_bytes)
            self._copies = driver.copies()
        except DriverError as error:
            raise RegionError(f"region {command.region_id} in device memory cannot be mapped: {error}") from error

    def read(self, extent: ExtentRef) -> Bytes:
        """Return a copy of the extent's bytes in host memory; raises RegionError."""
        self._check(extent)
        content: Bytes = np.empty(extent.num_bytes, np.uint8)
        with self._copying(extent):
            self._copies.to_host(content.ctypes.data, self._memory.address + extent.offset, extent.num_bytes)
        return content

    def copy_within_device(self, extent: ExtentRef, into: int) -> None:
        """Copy the extent to a device address; returns once it is there. Raises RegionError."""
        self._check(extent)
        with self._copying(extent):
            self._copies.within_device(into, self._memory.address + extent.offset, extent.num_bytes)

    def generations(self, slots: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the generations of slots; raises RegionError for slots outside the region."""
        if slots and not 0 <= min(slots) <= max(slots) < self._command.num_slots:
            raise RegionError(
                f"slots {min(slots)} to {max(slots)} are not all in region {self._command.region_id} with "
                f"{self._command.num_slots} slots"
            )
        return self._generations[slots]

    @contextmanager
    def _copying(self, extent: ExtentRef) -> Iterator[None]:
        try:
            yield
            self._copies.wait()  # a copy within a device returns early; generations are compared after it
        except DriverError as error:
            raise RegionError(f"slot {extent.slot} of region {extent.region_id} was not copied: {error}") from error

    def _check(self, extent: ExtentRef) -> None:
        end = extent.offset + extent.num_bytes
        if not 0 <= extent.offset <= end <= self._command.num_bytes or not 0 <= extent.slot < self._command.num_slots:
            raise RegionError(
                f"slot {extent.slot}, bytes {extent.offset} to {end}, is outside region {extent.region_id} with "
                f"{self._command.num_slots} slots in {self._command.num_bytes} bytes"
            )


def _check_generations(command: MapRegion, fd: int) -> None:
    size, needed = os.fstat(fd).st_size, command.num_slots * _GENERATION_BYTES
    if command.generations_offset or needed > size:
        raise RegionError(
            f"region {command.region_id} has {size} bytes of generations; {needed} for {command.num_slots} slots, "
            f"from byte {command.generations_offset} on, do not fit"
        )
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise RegionError(
            f"region {command.region_id} is not sealed: its owner could cut off the generations under its readers; "
            "add F_SEAL_SHRINK to the memfd"
        )
