"""A decode worker without a model: maps an owner's device memory, copies its blocks, and compares their content."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import numpy as np
import torch

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_engine.errors import RegionError
from tandem_engine.execution.device_pool import allocate_region
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.ops.torch_ops import TorchOps
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.packets import close_all
from tandem_runtime.kv.regions import RegionClient
from tests.device_kills.owner import _held
from tests.device_kills.world import (
    GEOMETRY,
    LAYOUT,
    LEASE_SECONDS,
    NUM_BLOCKS,
    SIZE,
    Count,
    Outcome,
    Place,
    Reached,
    Task,
    receive,
)


def read(connection: Connection, place: Place) -> None:
    """Serve tasks until the driver closes the connection."""
    torch.set_num_threads(1)
    asyncio.run(_Reader(connection, place).run())


class _NoModel:
    """A model for a runner that only moves blocks."""

    is_batch_invariant = True

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


class _Reader:
    def __init__(self, connection: Connection, place: Place) -> None:
        self._connection = connection
        self._place = place
        device = torch.device("cpu")
        region = allocate_region(device, NUM_BLOCKS, SIZE)
        self._cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, device, device_region=region)
        self._pool = BlockPool(NUM_BLOCKS, GEOMETRY.block_size, self._cache.generations)
        self._runner = ModelRunner(_NoModel(), TorchOps(), self._cache)
        self._mapped = ""

    async def run(self) -> None:
        place = self._place
        self._client = KvClient(place.address, place.incarnation, lease_seconds=LEASE_SECONDS)
        self._regions = RegionClient(place.socket)
        self._connection.send(Reached(0, "ready"))
        while (message := await receive(self._connection)) is not None:
            match message:
                case Task():
                    await self._read(message)
                case Count():
                    self._pool.check()
                    self._connection.send(_held(self._pool.num_used))
        await self._client.close()

    async def _read(self, task: Task) -> None:
        handle = task.parsed
        blocks = self._pool.allocate(task.num_blocks)
        assert blocks is not None, "one task at a time fits"
        try:
            await self._copy_all(task, blocks)
            found = np.concatenate([self._cache.bytes_of(block) for block in blocks])
            is_torn = not np.array_equal(found, task.content(0, task.num_blocks))
            outcome = Outcome(task.number, "read", is_torn)
        except RegionError:
            outcome = Outcome(task.number, "stale")
            self._unmap()
        except TandemError as error:
            outcome = Outcome(task.number, f"refused: {type(error).__name__}")
            self._unmap()
        try:
            await self._client.release(handle, "reader")
        except TandemError as error:
            outcome = Outcome(task.number, f"{outcome.what}, not released: {type(error).__name__}", outcome.is_torn)
        self._pool.free(blocks)
        self._connection.send(outcome)

    async def _copy_all(self, task: Task, blocks: list[int]) -> None:
        self._reached(task, "watching")
        async for event in self._client.watch(task.parsed, "reader", LAYOUT):
            if event.HasField("slab"):
                await self._copy(task, event.slab, blocks)
        self._reached(task, "copied")

    async def _copy(self, task: Task, slab: kv.Slab, blocks: list[int]) -> None:
        await self._map(slab.extents[0].region_id)
        self._reached(task, "mapped")
        targets = blocks[slab.first_block : slab.first_block + slab.num_blocks]
        extents = [
            ExtentRef(each.region_id, each.offset, each.num_bytes, each.slot, each.generation) for each in slab.extents
        ]
        self._reached(task, "copying")
        await asyncio.to_thread(self._runner.import_blocks, targets, extents)

    async def _map(self, region_id: str) -> None:
        if region_id == self._mapped:
            return
        self._unmap()
        grant = await self._regions.fetch(region_id, "device")
        sizes = grant.num_bytes, grant.num_slots, grant.generations_offset
        try:
            self._runner.map_region(MapRegion(region_id, *sizes, grant.kind), *grant.fds)
        finally:
            close_all(grant.fds)
        self._mapped = region_id

    def _unmap(self) -> None:
        """As a worker does with a region that is idle or could not be read."""
        self._runner.unmap_region(self._mapped)
        self._mapped = ""

    def _reached(self, task: Task, stage: str) -> None:
        self._connection.send(Reached(task.number, stage))


assert SIZE % 8 == 0, "content is made of words"
