"""Keeps the regions of other processes that this engine reads, in host or device memory, by their id."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tandem_engine.errors import RegionError
from tandem_engine.execution.cuda_vmm import Driver, DriverUnavailable
from tandem_engine.execution.device_region import MappedDeviceRegion
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.regions import Bytes, MappedRegion
from tandem_engine.messages import ExtentRef, MapRegion


class MappedRegions:
    """Other processes' regions by their id."""

    def __init__(self, driver: Callable[[], Driver] = Driver) -> None:
        """`driver` opens the driver at the first region in device memory; it may raise DriverUnavailable."""
        self._regions: dict[str, MappedRegion | MappedDeviceRegion] = {}
        self._refusals: dict[str, str] = {}
        self._open_driver = driver
        self._driver: Driver | None = None

    def map(self, command: MapRegion, fd: int, memory_fd: int | None = None) -> None:
        """Map a region; replaces one of the same id. Raises RegionError if a descriptor does not match the command.

        The caller closes the descriptors. `memory_fd` comes with kind "device"; `fd` then has the generations alone.
        """
        self.unmap(command.region_id)
        try:
            self._regions[command.region_id] = self._mapped(command, fd, memory_fd)
        except RegionError as error:
            self._refusals[command.region_id] = str(error)  # the copies that need it name the same reason
            raise

    def unmap(self, region_id: str) -> None:
        """Forget a region; unknown ids are ignored."""
        self._regions.pop(region_id, None)
        self._refusals.pop(region_id, None)

    def read(self, extent: ExtentRef) -> Bytes:
        """Return the extent's bytes: a read-only view of host memory, a copy of device memory. Raises RegionError."""
        return self._region(extent).read(extent)

    def copy(self, extent: ExtentRef, into: PagedKVCache, first: int) -> None:
        """Copy an extent into whole blocks of a pool from `first` on; raises RegionError."""
        region, address = self._region(extent), into.device_address(first)
        if isinstance(region, MappedDeviceRegion) and address is not None:
            region.copy_within_device(extent, address)
        else:
            into.write_blocks(first, region.read(extent))

    def check_generations(self, extents: Sequence[ExtentRef]) -> None:
        """Raise RegionError if any slot was reused since its extent was described."""
        for region_id in {extent.region_id for extent in extents}:
            described = [extent for extent in extents if extent.region_id == region_id]
            now = self._region(described[0]).generations([extent.slot for extent in described])
            for index in np.flatnonzero(now != np.array([extent.generation for extent in described], np.uint64))[:1]:
                extent = described[index]
                raise RegionError(
                    f"slot {extent.slot} of region {region_id} has generation {now[index]} now, "
                    f"expected {extent.generation}: its lease expired while it was read; compute it again"
                )

    def _mapped(self, command: MapRegion, fd: int, memory_fd: int | None) -> MappedRegion | MappedDeviceRegion:
        if command.kind == "host":
            return MappedRegion(command, fd)
        if memory_fd is None:
            raise RegionError(f"region {command.region_id} is in device memory and came with one descriptor of two")
        try:
            self._driver = self._driver or self._open_driver()
        except DriverUnavailable as error:
            raise RegionError(
                f"region {command.region_id} is in MEMORY_KIND_DEVICE, which this worker cannot map: {error}; "
                "start the prefill worker with --kv-region host"
            ) from error
        return MappedDeviceRegion(command, fd, memory_fd, self._driver)

    def _region(self, extent: ExtentRef) -> MappedRegion | MappedDeviceRegion:
        if (region := self._regions.get(extent.region_id)) is None:
            refusal = self._refusals.get(extent.region_id)
            raise RegionError(refusal or f"region {extent.region_id} is not mapped here; send MapRegion first")
        return region
