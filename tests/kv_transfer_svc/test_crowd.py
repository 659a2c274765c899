"""Tests that many hand-overs at once, some of them cancelled or aborted, leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Aborted, TandemError
from tandem_runtime.kv.client import KvClient
from tests.kv_transfer_svc.host import a_client, closed, nothing_is_left, running_host, running_writer, until
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.writer import Writer

NUM_HANDLES = 48


async def write(writer: Writer, handle: pb.KvHandle, dice: random.Random) -> None:
    await writer.client.reserve(handle, writer.region_id, a_layout())
    for index in range(2):
        if dice.random() < 0.1:
            await writer.client.abort(handle, Aborted("the engine gave up"))
            return
        slots = [dice.randrange(16), dice.randrange(16)]
        await writer.client.seal(handle, [writer.slab(index, 2 * index, slots)], closed(4) if index else None)


async def read(reader: KvClient, handle: pb.KvHandle, reader_id: str) -> int:
    """Watch to the end and release, after a cancel too; return the bytes seen."""
    num_bytes = 0
    try:
        async for event in reader.watch(handle, reader_id, a_layout()):
            num_bytes += sum(extent.num_bytes for extent in event.slab.extents)
        return num_bytes
    finally:
        await reader.release(handle, reader_id)


@pytest.mark.parametrize("is_remote", [False, True])
async def test_a_crowd_with_cancels_and_aborts_leaves_every_pool_full(tmp_path: Path, is_remote: bool) -> None:
    dice = random.Random(7)
    async with running_host(tmp_path, arena_bytes=12 * BLOCK_BYTES) as here, running_host(tmp_path) as elsewhere:
        holder = elsewhere if is_remote else here
        async with running_writer(holder) as writer, a_client(here) as reader:
            handles = [writer.handle(num_blocks=4) for _ in range(NUM_HANDLES)]
            reading = [asyncio.ensure_future(read(reader, handle, "r")) for handle in handles]
            writing = [asyncio.ensure_future(write(writer, handle, dice)) for handle in handles]
            for number, task in enumerate(reading):
                if number % 3 == 0:
                    await asyncio.sleep(0)
                    task.cancel()
            results = await asyncio.gather(*reading, return_exceptions=True)
            written = await asyncio.gather(*writing, return_exceptions=True)
            assert all(result is None or isinstance(result, TandemError) for result in written)
            whole = [result for result in results if isinstance(result, int)]
            assert whole and set(whole) == {4 * BLOCK_BYTES}
            assert all(isinstance(r, int | TandemError | asyncio.CancelledError) for r in results)
            for handle in handles:  # a task cancelled before its first step never released: the gateway does
                await reader.release_all(handle)
            reported: set[bytes] = set()
            async for ended in writer.client.own(writer.region_id):
                reported.add(ended.handle_id)
                if reported >= {
                    record.handle.handle_id for record in holder.store._records.values() if record.region_id
                }:
                    break
        await until(lambda: nothing_is_left(here) and nothing_is_left(elsewhere))
