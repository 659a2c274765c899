"""A pull reads some windows at once; they are sealed in their order, however they end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc.transport.links import Link, Received
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import KvNotFound
from tandem_runtime.kv.client import KvClient
from tests.kv_transfer_svc.host import Host, a_client, running_host, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import a_layout
from tests.kv_transfer_svc.test_two_hosts import bytes_at, sealed_handle, until_everything_is_back
from tests.kv_transfer_svc.writer import Writer

SLOTS = [5, 3, 8, 1, 0, 15, 9, 2, 11, 4, 7, 12]
"""Six slabs of two blocks."""


class HeldReads:
    """Reads that end when they may: by their first block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: list[int] = []
        self.most_at_once = 0
        self.may_end: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._read = Link.read
        monkeypatch.setattr(Link, "read", lambda link, *arguments: self._held(link, *arguments))

    async def _held(self, link: Link, *arguments: Any) -> Received:
        first_block = arguments[-1]
        self.running.append(first_block)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await self.may_end[first_block].wait()
            return await self._read(link, *arguments)
        finally:
            self.running.remove(first_block)


@asynccontextmanager
async def two_hosts(folder: Path) -> AsyncIterator[tuple[Host, Host, Writer, KvClient]]:
    async with (
        running_host(folder) as here,
        running_host(folder) as there,
        running_writer(there) as writer,
        a_client(here) as reader,
    ):
        yield here, there, writer, reader


async def test_four_reads_run_at_once_and_are_sealed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts(tmp_path) as (here, there, writer, reader):
        reads = HeldReads(monkeypatch)
        handle = await sealed_handle(writer, SLOTS)
        watching = reader.watch(handle, "r", a_layout(), acknowledges=True)
        first = asyncio.ensure_future(anext(watching))
        await until(lambda: reads.running == [0, 2, 4, 6])
        for first_block in (6, 4, 2):
            reads.may_end[first_block].set()
        await until(lambda: reads.running == [0])
        assert not first.done() and here.store.counters["slabs_pulled"] == 0
        for first_block in (0, 8, 10):
            reads.may_end[first_block].set()
        events: list[kv.WatchEvent] = [await first]
        events += [await anext(watching) for _ in range(5)]
        assert [event.slab.first_block for event in events] == [0, 2, 4, 6, 8, 10]
        content = b"".join([await bytes_at(here, event.slab) for event in events])
        assert content == b"".join(map(writer.block, SLOTS))
        assert (await anext(watching)).closed.num_slabs == 6
        assert reads.most_at_once == 4
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)


async def test_readers_hear_of_a_failure_before_the_other_reads_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_hosts(tmp_path) as (here, there, writer, reader):
        reads, may_end = HeldReads(monkeypatch), asyncio.Event()

        async def lasting(link: Link, *arguments: Any) -> Received:
            if arguments[-1] == 4:
                await until(lambda: reads.running == [0, 2, 6])
                raise KvNotFound("the holder has no such block")
            try:
                return await reads._held(link, *arguments)
            finally:
                await may_end.wait()

        monkeypatch.setattr(Link, "read", lasting)
        handle = await sealed_handle(writer, SLOTS)
        with pytest.raises(KvNotFound, match="no such block"):
            await watch_all(reader, handle, "r")
        await reader.release(handle, "r")
        assert here.arena.used_bytes > 0, "the reads still use it"
        may_end.set()
        await until_everything_is_back(here, there)


async def test_a_read_that_fails_ends_the_others_and_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts(tmp_path) as (here, there, writer, reader):
        reads = HeldReads(monkeypatch)

        async def refuse(link: Link, *arguments: Any) -> Received:
            if arguments[-1] == 4:
                await until(lambda: reads.running == [0, 2, 6])
                raise KvNotFound("the holder has no such block")
            return await reads._held(link, *arguments)

        monkeypatch.setattr(Link, "read", refuse)
        handle = await sealed_handle(writer, SLOTS)
        with pytest.raises(KvNotFound, match="no such block"):
            await watch_all(reader, handle, "r")
        await reader.release(handle, "r")
        await until_everything_is_back(here, there)
        assert reads.running == []
