"""Reads blocks from a KV service of the same host: copies them from shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.pieces import groups, run_interruptible
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import KvCorrupt, KvNotFound, TandemError, Unsupported
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv.shared_region import SharedRegion


class ShmTransport:
    """Maps a region of the peer for one read only: a lasting mapping would keep the memory of a dead worker."""

    name = "shm"

    def __init__(self, kv_socket: str, threads: Executor) -> None:
        self._regions = RegionClient(kv_socket)
        self._threads = threads

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        num_dropped = max(0, first_block - slab.first_block)
        extents, checksums = slab.extents[num_dropped:], list(slab.checksums[num_dropped:])
        (region_id,) = {extent.region_id for extent in extents}
        region = await self._map(region_id)
        copy = _Copy(region, extents, into)
        try:
            await run_interruptible(self._threads, partial(copy.run, checksums), copy.stop)
        finally:
            region.close()
        return checksums

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        raise Unsupported("stored blocks of a service on the same host are read over gRPC")

    async def probe(self, num_bytes: int) -> int:
        """Check that the peer's socket answers. The speed of memory shows with the first slab."""
        try:
            (await self._map("")).close()
        except LinkBroken as error:
            if not isinstance(error.__cause__, KvNotFound):
                raise
        return 0

    async def close(self) -> None:
        await self._regions.close()

    async def _map(self, region_id: str) -> SharedRegion:
        try:
            grant = await self._regions.fetch(region_id)
            return SharedRegion.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
        except (TandemError, OSError, ValueError) as error:
            raise LinkBroken(f"region {region_id!r} cannot be mapped: {error}") from error


class _Copy:
    """Copies one slab in a thread."""

    def __init__(self, region: SharedRegion, extents: Sequence[pb.Extent], into: Sequence[memoryview]) -> None:
        self._region = region
        self._extents = extents
        self._into = into
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    def run(self, checksums: Sequence[int]) -> None:
        """Copy, then compare generations and one checksum, as always on one host."""
        views = [self._region.view(extent.offset, extent.num_bytes) for extent in self._extents]
        for targets, sources in zip(groups(self._into), groups(views), strict=True):
            if self._is_stopped:
                return
            for target, source in zip(targets, sources, strict=True):
                target[:] = source
        for extent in self._extents:
            self._region.check_generation(extent)
        if checksums and block_checksum(self._into[0]) != checksums[0]:
            raise KvCorrupt(
                f"slot {self._extents[0].slot} of region {self._extents[0].region_id} does not match its checksum",
                field="checksums",
            )
