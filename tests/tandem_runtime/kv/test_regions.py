from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest, KvCorrupt, KvNotFound, Unavailable
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import RegionClient, RegionGrant, RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.paths import forget_dead_sockets
from tests.kv_transfer_svc.host import until


class Keeper:
    """Keeps descriptors and says what happened."""

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}
        self.memory_fds: dict[str, int] = {}
        self.offers: dict[str, RegionOffer] = {}
        self.connections: dict[str, object] = {}
        self.news: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def take(self, offer: RegionOffer, fd: int, connection: object, memory_fd: int | None = None) -> None:
        if memory_fd is not None:
            self.memory_fds[offer.region_id] = memory_fd
        if offer.num_slots == 0:
            os.close(fd)
            raise InvalidRequest("a region without slots", field="num_slots")
        if offer.region_id in self.fds:
            os.close(self.fds[offer.region_id])
        self.fds[offer.region_id] = fd
        self.offers[offer.region_id] = offer
        self.connections[offer.region_id] = connection
        self.news.put_nowait(("taken", offer.region_id))

    def owner_gone(self, region_id: str, connection: object) -> None:
        self.news.put_nowait(("gone", region_id))

    def grant(self, region_id: str) -> RegionGrant:
        if region_id not in self.fds:
            raise KvNotFound(f"no region {region_id}")
        offer = self.offers[region_id]
        memory_fd = os.dup(self.memory_fds[region_id]) if region_id in self.memory_fds else None
        sizes = offer.num_bytes, offer.num_slots, offer.generations_offset
        return RegionGrant(os.dup(self.fds[region_id]), *sizes, memory_fd)


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Keeper]:
    keeper = Keeper()
    server = RegionServer(path, keeper)
    await server.start()
    try:
        yield keeper
    finally:
        await server.close()
        for fd in (*keeper.fds.values(), *keeper.memory_fds.values()):
            os.close(fd)


@pytest.fixture
def region() -> SharedRegion:
    return SharedRegion.create("test", 8192, 2)


async def lend(client: RegionClient, region: SharedRegion, region_id: str = "r", num_slots: int = 2) -> None:
    await client.offer(region_id, "me", region.total_bytes, num_slots, 4096, region.generations_offset, region.fd)


async def test_a_lent_region_is_the_same_memory(tmp_path: Path, region: SharedRegion) -> None:
    async with serving(tmp_path / "s") as keeper:
        client = RegionClient(str(tmp_path / "s"))
        await lend(client, region)
        assert keeper.offers["r"].incarnation == "me"
        grant = await client.fetch("r")
        mapped = SharedRegion.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
        region.view(4096, 3)[:] = b"abc"
        extent = pb.Extent(region_id="r", offset=4096, num_bytes=3, slot=1, generation=0)
        assert mapped.copy_out(extent, 0, 3) == b"abc"
        region.next_generation(1)
        with pytest.raises(KvCorrupt):
            mapped.copy_out(extent, 0, 3)
        mapped.close()
        await client.close()
        region.close()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_the_socket_goes_with_the_service(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(path):
        assert names_in(tmp_path) == ["s"]
    assert names_in(tmp_path) == []


async def test_services_that_start_at_once_do_not_take_each_other_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(socket.socket):
        def listen(self, *backlog: int) -> None:
            forget_dead_sockets("kv-*.sock", tmp_path)  # another one starts between bind and listen
            super().listen(*backlog)

    monkeypatch.setattr("tandem_runtime.kv.region_server.socket.socket", Slow)
    async with serving(tmp_path / "kv-1.sock"):
        assert names_in(tmp_path) == ["kv-1.sock"]
        forget_dead_sockets("kv-*.sock", tmp_path)
        assert names_in(tmp_path) == ["kv-1.sock"]


async def test_a_closed_connection_is_a_dead_owner(tmp_path: Path, region: SharedRegion) -> None:
    async with serving(tmp_path / "s") as keeper:
        client = RegionClient(str(tmp_path / "s"))
        await lend(client, region)
        await client.close()
        assert [await keeper.news.get() for _ in range(2)] == [("taken", "r"), ("gone", "r")]
        region.close()


async def test_a_region_is_offered_again_to_the_services_next_life(tmp_path: Path, region: SharedRegion) -> None:
    client = RegionClient(str(tmp_path / "s"))
    async with serving(tmp_path / "s") as keeper:
        await lend(client, region)
        assert await keeper.news.get() == ("taken", "r")
    async with serving(tmp_path / "s") as keeper:
        assert await keeper.news.get() == ("taken", "r")
        await client.close()
    region.close()


async def test_refusals_come_back_typed(tmp_path: Path, region: SharedRegion) -> None:
    async with serving(tmp_path / "s"):
        client = RegionClient(str(tmp_path / "s"))
        with pytest.raises(InvalidRequest, match="without slots") as refused:
            await lend(client, region, num_slots=0)
        assert refused.value.field == "num_slots"
        with pytest.raises(KvNotFound):
            await client.fetch("unknown")
        region.close()
    with pytest.raises(Unavailable, match="no KV service answers"):
        await RegionClient(str(tmp_path / "nobody")).fetch("r")


async def test_nonsense_hangs_up_on_its_sender_alone(tmp_path: Path, region: SharedRegion) -> None:
    async with serving(tmp_path / "s") as keeper:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(str(tmp_path / "s"))
        raw.send(b"not json")
        connection = PacketSocket(raw)
        assert await connection.receive() is None
        connection.close()
        client = RegionClient(str(tmp_path / "s"))
        await lend(client, region)
        assert await keeper.news.get() == ("taken", "r")
        await client.close()
        region.close()


def test_a_regions_size_is_fixed(region: SharedRegion) -> None:
    with pytest.raises(OSError):
        os.ftruncate(region.fd, 0)
    region.close()


def test_a_region_without_room_for_its_generations_is_refused(region: SharedRegion) -> None:
    with pytest.raises(InvalidRequest, match="has no room for 3 generations"):
        SharedRegion.map_read_only(os.dup(region.fd), 3, region.generations_offset)
    region.close()


async def test_regions_are_lent_again_once_there_are_descriptors_again(tmp_path: Path, region: SharedRegion) -> None:
    async with serving(tmp_path / "s"):
        client = RegionClient(str(tmp_path / "s"))
        await lend(client, region)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(region.fd)
        os.close(lowest_free)
        with structlog.testing.capture_logs() as lines:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            try:
                waiting.connect(str(tmp_path / "s"))  # in the backlog: accepting it takes a descriptor more
                await until(lambda: any(line["event"] == "kv_region_connection_not_accepted" for line in lines))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close((await asyncio.wait_for(client.fetch("r"), 10)).fd)
        assert not any(line["log_level"] == "error" for line in lines)
        waiting.close()
        await client.close()
        region.close()
