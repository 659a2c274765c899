"""A KV service tells which sample points its store has, and what it evicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.host_points import HostPoints
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_engine.scheduling.sample_points import is_sample_point
from tandem_runtime.errors import PermissionDenied
from tandem_runtime.kv.client import KvClient
from tests.certificates import Authority
from tests.kv_transfer_svc.host import a_client, running_host, running_writer, until
from tests.kv_transfer_svc.test_host_cache import chain, fill_with_others, published, wanted
from tests.kv_transfer_svc.writer import Writer

CHAIN = chain(40)


def test_a_sample_point_ends_at_16_32_64_128_or_a_multiple_of_256_tokens() -> None:
    assert [num for num in range(1, 1030) if is_sample_point(num)] == [16, 32, 64, 128, 256, 512, 768, 1024]
    assert not is_sample_point(0)


class Seen:
    """What one reader of a host's events knows by now."""

    def __init__(self) -> None:
        self.places: dict[str, set[bytes]] = {}
        self.num_snapshots = 0
        self.numbers: list[int] = []

    def take(self, batch: kv.BlockEventBatch) -> None:
        self.numbers.append(batch.number)
        if batch.is_snapshot:
            self.num_snapshots += 1
            self.places = {}
        for place in batch.places:
            if place.is_gone:
                del self.places[place.incarnation]
                continue
            points = self.places.setdefault(place.incarnation, set())
            evicted, stored = points_in(place.evicted), points_in(place.stored)
            assert evicted <= points and not stored & points
            points -= evicted
            points |= stored

    @property
    def store(self) -> set[bytes]:
        return self.places.get("", set())


def points_in(packed: bytes) -> set[bytes]:
    return {packed[start : start + 8] for start in range(0, len(packed), 8)}


def points(hashes: Sequence[bytes], *places: int) -> set[bytes]:
    return {hashes[place][:8] for place in places}


@asynccontextmanager
async def reading(client: KvClient) -> AsyncIterator[Seen]:
    seen = Seen()

    async def read() -> None:
        async with aclosing(client.block_events()) as batches:
            async for batch in batches:
                seen.take(batch)

    task = asyncio.create_task(read())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def placed(request: kv.PublishRequest, first_block: int, tokens_per_block: int = 16) -> kv.PublishRequest:
    request.first_block, request.tokens_per_block = first_block, tokens_per_block
    return request


async def publish(writer: Writer, hashes: Sequence[bytes], first: int = 0, tokens_per_block: int = 16) -> None:
    """Publish a chain from a block on, in calls of eight blocks."""
    for start in range(first, len(hashes), 8):
        run = hashes[start : start + 8]
        request = published(writer, run, range(len(run)), parent=hashes[start - 1] if start else b"")
        await writer.client.publish(placed(request, start, tokens_per_block))


async def test_readers_are_told_of_the_stores_sample_points_and_of_evictions(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as gateway:
        await publish(writer, CHAIN[:20])
        host.service.sweep()
        async with reading(gateway) as seen:
            # 1. First everything.
            await until(lambda: seen.store == points(CHAIN, 0, 1, 3, 7, 15))
            # 2. Then changes.
            await publish(writer, CHAIN, first=16)
            host.service.sweep()
            await until(lambda: seen.store == points(CHAIN, 0, 1, 3, 7, 15, 31))
            # 3. What is evicted is gone.
            await fill_with_others(host, writer, writer.client)
            host.service.sweep()
            await until(lambda: seen.store == set())
        assert (seen.num_snapshots, seen.numbers) == (1, list(range(len(seen.numbers))))


async def test_a_block_that_moves_to_disk_is_still_stored_and_found_again_after_a_restart(tmp_path: Path) -> None:
    def disk() -> DiskTier:
        return DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)

    async with running_host(tmp_path, disk=disk()) as host, running_writer(host) as writer:
        await publish(writer, CHAIN[:8])
        await fill_with_others(host, writer, writer.client)
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7)
    async with running_host(tmp_path, disk=disk()) as host, a_client(host) as reader:
        host.service.sweep()
        assert not host.service.points.points_of("")  # nobody has said yet where the blocks lie in their chains
        request = wanted(CHAIN[:8])
        request.tokens_per_block = 16
        assert (await reader.load(request)).num_from_disk == 8
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7)


async def test_blocks_of_more_tokens_have_their_points_at_the_same_tokens(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        await publish(writer, CHAIN[:20], tokens_per_block=32)
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7, 15)
        await publish(writer, chain(20, "of a worker that does not state the place"), tokens_per_block=0)
        host.service.sweep()
        assert len(host.service.points) == 5


async def test_only_gateways_may_read_block_events(tmp_path: Path) -> None:
    authority = Authority()
    service, decode = (authority.member(tmp_path, role) for role in ("kv", "decode"))
    async with running_host(tmp_path, member=service) as host, a_client(host, decode) as client:
        with pytest.raises(PermissionDenied):
            async for _ in client.block_events():
                pass


# ------------------------------------------------------------------------------------------------ the host's points


def a_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_changes_of_one_batch_that_cancel_out_are_not_sent() -> None:
    host, seen = HostPoints(), Seen()
    host.change("w", [a_key(1), a_key(2)], [])
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(1), a_key(2)}}
        host.change("w", [a_key(3)], [a_key(1)])
        host.change("w", [a_key(1)], [a_key(3)])
        host.change("w", [], [a_key(2)])
        (batch,) = reader.take()
        assert (batch.places[0].stored, batch.places[0].evicted) == (b"", a_key(2))
        assert list(reader.take()) == []
        host.change("w", [], [a_key(9)])  # never stored: nothing changes
        assert list(reader.take()) == []


def test_a_pool_that_ends_is_told_of_and_may_come_back() -> None:
    host, seen = HostPoints(), Seen()
    host.change("w", [a_key(1)], [])
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        host.end("w")
        host.end("w")
        host.change("w", [a_key(5)], [])
        for batch in reader.take():
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(5)}}


def test_a_reader_that_is_too_slow_gets_everything_again_in_parts() -> None:
    host, seen = HostPoints(), Seen()
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        for start in range(0, 250_000, 1_000):
            host.change("w", [a_key(number) for number in range(start, start + 1_000)], [])
        assert reader._num_pending == 0
        batches = list(reader.take())
        assert [batch.is_snapshot for batch in batches] == [True, False, False, False, False]
        host.change("w", [], [a_key(0)])  # while the parts are on their way
        for batch in [*batches, *reader.take()]:
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(number) for number in range(1, 250_000)}}
        assert seen.numbers == list(range(7))
