"""One producer serves all readers of the live page; it rests without readers, and ends every stream when it closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.fleet.registry import WorkerRegistry
from control_plane.live.cache_history import CacheHistory
from control_plane.live.feed import LiveFeed
from control_plane.live.fleet_rows import FleetRows
from control_plane.live.viewers import MAX_VIEWERS, TooManyViewers, Viewer, Viewers
from tandem.v1 import types_pb2 as pb
from tests.herd import Herd, load_of


class Events:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield await self.queue.get()


class RequestRows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def newest(self, limit: int) -> list[dict[str, Any]]:
        return self.rows[:limit]

    def num_ended(self) -> int:
        return len(self.rows)


class Looks(FleetRows):
    """Counts how often anybody looks at the fleet."""

    num_looks = 0

    async def changes(self) -> Any:
        self.num_looks += 1
        return await super().changes()


class World:
    def __init__(self, num_workers: int = 8) -> None:
        self.registry = WorkerRegistry(3600.0, 7200.0)
        self.herd = Herd(self.registry, num_workers)
        self.rows, self.events, self.requests = Looks(self.registry), Events(), RequestRows()
        self.feed = LiveFeed(
            self.rows,
            CacheHistory(self.registry),
            gateway="gateway-1",
            models=lambda: ["@stand-in/model"],
            requests=self.requests,
            events=self.events,
            event_kinds=("worker_joined",),
            turn_seconds=0.02,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.feed.run()), asyncio.create_task(self.feed.run_events())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Reader:
    """Reads frames as events."""

    def __init__(self, viewer: Viewer) -> None:
        self.frames = viewer.frames()

    async def next(self, kind: str) -> Any:
        """Return the data of the next event of a kind."""
        async with asyncio.timeout(10):
            while True:
                event, data = (await anext(self.frames)).decode().strip().split("\n")
                if event == f"event: {kind}":
                    return json.loads(data.removeprefix("data: "))


async def test_a_reader_gets_the_present_first_and_then_what_changes() -> None:
    world = World()
    async with world.running():
        reader = Reader(world.feed.join())
        hello = await reader.next("hello")
        assert hello["gateway"] == "gateway-1" and hello["event_kinds"] == ["worker_joined"]
        assert [tier["tier"] for tier in (await reader.next("cache"))["tiers"]] in ([], ["pool", "store", "disk"])
        full = await reader.next("fleet")
        assert full["full"] and len(full["workers"]) == 8 and full["models"] == ["@stand-in/model"]
        world.herd.beat(2, load_of(2, state=pb.WORKER_STATE_DRAINING))
        change = await reader.next("fleet")
        assert not change["full"] and [row["id"] for row in change["workers"]] == ["decode-2"]


async def test_a_second_reader_begins_with_everything_while_the_first_goes_on() -> None:
    world = World()
    async with world.running():
        first = Reader(world.feed.join())
        await first.next("fleet")
        second = Reader(world.feed.join())
        assert (await second.next("fleet"))["full"]
        world.herd.beat(1, load_of(1, num_running=3))
        assert [(await reader.next("fleet"))["workers"][0]["num_running"] for reader in (first, second)] == [3, 3]


async def test_requests_and_events_reach_every_reader() -> None:
    world = World()
    async with world.running():
        readers = [Reader(world.feed.join()) for _ in range(2)]
        assert [(await reader.next("requests"))["data"] for reader in readers] == [[], []]
        world.requests.rows = [{"id": "one"}]
        assert [(await reader.next("requests"))["data"] for reader in readers] == [[{"id": "one"}]] * 2
        world.events.queue.put_nowait({"id": 7})
        assert [(await reader.next("event"))["id"] for reader in readers] == [7, 7]


async def test_nobody_looks_at_the_fleet_without_readers() -> None:
    world = World()
    async with world.running():
        viewer = world.feed.join()
        await Reader(viewer).next("fleet")
        world.feed.leave(viewer)
        at_rest = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, at_rest.set)
        before = world.rows.num_looks
        await at_rest.wait()
        assert world.rows.num_looks <= before + 1, "at most the look that had begun"
        late = Reader(world.feed.join())
        assert (await late.next("fleet"))["full"], "what was known is old"
        assert (await late.next("requests"))["data"] == [], "though it is as the reader before had it"


async def test_a_feed_that_closes_ends_every_stream_and_each_that_comes_later() -> None:
    world = World()
    async with world.running():
        reader = Reader(world.feed.join())
        await reader.next("fleet")
        world.feed.close()
        with pytest.raises(StopAsyncIteration):
            await reader.next("no such event")
        with pytest.raises(StopAsyncIteration):
            await Reader(world.feed.join()).next("no such event")


async def test_a_reader_that_does_not_read_gets_the_present_instead_of_the_past() -> None:
    viewers = Viewers(lambda: [b"present"])
    slow = viewers.join().frames()
    for number in range(66):
        viewers.send(b"%d" % number)
    assert [await anext(slow) for _ in range(3)] == [b"present", b"64", b"65"]


async def test_there_is_a_bound_on_readers_and_a_place_is_free_again_after_one_left() -> None:
    viewers = Viewers(list)
    readers = [viewers.join() for _ in range(MAX_VIEWERS)]
    with pytest.raises(TooManyViewers, match="64 readers"):
        viewers.join()
    viewers.leave(readers[0])
    viewers.join()
