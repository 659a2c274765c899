"""A prefill worker without a model: fills blocks of a pool in device memory, and hands them over."""

from __future__ import annotations

import asyncio
import ctypes
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine.execution.device_pool import allocate_region
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.regions import RegionClient
from tests.device_kills.world import (
    GEOMETRY,
    LAYOUT,
    LEASE_SECONDS,
    NUM_BLOCKS,
    SIZE,
    Churn,
    Count,
    Held,
    Outcome,
    Place,
    Reached,
    Task,
    receive,
)


def own(connection: Connection, place: Place) -> None:
    """Serve tasks until the driver closes the connection."""
    torch.set_num_threads(1)
    asyncio.run(_Owner(connection, place).run())


class _Owner:
    def __init__(self, connection: Connection, place: Place) -> None:
        self._connection = connection
        self._place = place
        device = torch.device("cpu")
        region = allocate_region(device, NUM_BLOCKS, SIZE)
        self._cache = PagedKVCache(GEOMETRY, NUM_BLOCKS, device, device_region=region)
        self._pool = BlockPool(NUM_BLOCKS, GEOMETRY.block_size, self._cache.generations)
        self._held: dict[bytes, list[int]] = {}
        self._freed = asyncio.Event()

    async def run(self) -> None:
        place, cache = self._place, self._cache
        self._client = KvClient(place.address, place.incarnation, lease_seconds=LEASE_SECONDS)
        regions = RegionClient(place.socket)
        sizes = cache.region_bytes, NUM_BLOCKS, SIZE, cache.generations_offset
        await regions.offer(place.incarnation, place.incarnation, *sizes, *cache.region_fds)
        following = asyncio.create_task(self._free_ended())
        self._connection.send(Reached(0, "ready"))
        while (message := await receive(self._connection)) is not None:
            match message:
                case Task():
                    await self._fill(message)
                case Churn():
                    self._churn()
                case Count():
                    self._pool.check()
                    self._connection.send(_held(self._pool.num_used))
        following.cancel()
        await self._client.close()
        await regions.close()

    async def _free_ended(self) -> None:
        async for ended in self._client.own(self._place.incarnation):
            if blocks := self._held.pop(ended.handle_id, None):
                self._pool.free(blocks)
                self._freed.set()

    async def _fill(self, task: Task) -> None:
        handle = task.parsed
        while (blocks := self._pool.allocate(task.num_blocks)) is None:
            self._freed.clear()
            await self._freed.wait()  # handles of killed readers end with their leases
        self._held[handle.handle_id] = blocks
        self._reached(task, "allocated")
        try:
            await self._client.reserve(handle, self._place.incarnation, LAYOUT)
            self._reached(task, "reserved")
            half = len(blocks) // 2
            for index, (first, end) in enumerate(((0, half), (half, len(blocks)))):
                if first == end:
                    continue
                for place, block in enumerate(blocks[first:end], first):
                    self._cache.write_blocks(block, task.content(place, place + 1))
                is_last = end == len(blocks)
                closed = kv.Closed(num_blocks=end, first_tokens=[kv.FirstToken(token_id=7)]) if is_last else None
                slab = self._slab(min(index, half), first, blocks[first:end])
                await self._client.seal(handle, [slab], closed)
                self._reached(task, "sealed" if is_last else "half sealed")
            self._connection.send(Outcome(task.number, "sealed"))
        except TandemError as error:
            self._connection.send(Outcome(task.number, f"not sealed: {type(error).__name__}"))
            if freed := self._held.pop(handle.handle_id, None):  # as a worker does whose handle was refused
                self._pool.free(freed)

    def _slab(self, index: int, first: int, blocks: list[int]) -> kv.Slab:
        extents = [
            pb.Extent(
                kind=pb.MEMORY_KIND_DEVICE,
                region_id=self._place.incarnation,
                offset=block * SIZE,
                num_bytes=SIZE,
                slot=block,
                generation=self._cache.generations[block],
            )
            for block in blocks
        ]
        return kv.Slab(index=index, first_block=first, num_blocks=len(blocks), num_layers=2, extents=extents)

    def _churn(self) -> None:
        blocks = self._pool.allocate(self._pool.num_free) or []
        for block in blocks:
            self._cache.write_blocks(block, np.full(SIZE, 0xFF, np.uint8))
        self._pool.free(blocks)

    def _reached(self, task: Task, stage: str) -> None:
        self._connection.send(Reached(task.number, stage))


def _held(num_blocks_used: int) -> Held:
    stub = ctypes.CDLL("libcuda.so.1")
    num_descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return Held(num_blocks_used, stub.tandem_stub_num_held(1), num_descriptors)
