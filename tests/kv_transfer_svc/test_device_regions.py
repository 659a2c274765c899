"""A KV service passes regions in device memory on, checks their slots, and refuses by name what needs their bytes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesRequest
from tandem_runtime.errors import InvalidRequest, KvNotFound, TandemError, Unavailable, Unsupported
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.regions import RegionClient, RegionGrant
from tandem_runtime.kv.shared_region import SharedRegion
from tests.descriptors import OpenFiles
from tests.kv_transfer_svc.host import Host, a_client, closed, nothing_is_left, running_host, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_host_cache import chain, published
from tests.kv_transfer_svc.writer import Writer

NUM_SLOTS = 16
REMEDY = "start the prefill worker with --kv-region host"


class DeviceWriter(Writer):
    """A prefill worker with its pool in device memory. The memory's descriptor is a pipe: nobody can read it."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.socket, host.address, host.incarnation)
        self.region.close()
        self.region = SharedRegion.create("test-generations", 0, NUM_SLOTS)
        self.memory_fd, self.other_end = os.pipe()
        self.num_bytes = NUM_SLOTS * BLOCK_BYTES

    @property
    def fds(self) -> tuple[int, int]:
        return self.region.fd, self.memory_fd

    async def lend(self, **changes: Any) -> None:
        offer = {
            "num_bytes": self.num_bytes,
            "num_slots": NUM_SLOTS,
            "bytes_per_slot": BLOCK_BYTES,
            "generations_offset": 0,
            "fd": self.region.fd,
            "memory_fd": self.memory_fd,
        }
        await self.regions.offer(self.region_id, self.incarnation, **{**offer, **changes})

    def slab(self, index: int, first_block: int, slots: Any, **changes: Any) -> kv.Slab:
        slab = super().slab(index, first_block, slots, **changes)
        for extent in slab.extents:
            extent.kind = pb.MEMORY_KIND_DEVICE
        return slab

    async def close(self) -> None:
        await super().close()
        os.close(self.memory_fd)
        os.close(self.other_end)


@asynccontextmanager
async def device_writer(host: Host) -> AsyncIterator[DeviceWriter]:
    writer = DeviceWriter(host)
    try:
        await writer.lend()
        yield writer
    finally:
        await writer.close()


def close(grant: RegionGrant) -> None:
    for fd in grant.fds:
        os.close(fd)


async def sealed(writer: DeviceWriter, num_blocks: int = 2) -> pb.KvHandle:
    handle = writer.handle(num_blocks=num_blocks)
    await writer.client.reserve(handle, writer.region_id, a_layout())
    await writer.client.seal(handle, [writer.slab(0, 0, list(range(num_blocks)))], closed(num_blocks))
    return handle


async def test_a_reader_gets_both_descriptors_and_the_slabs_that_name_device_memory(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, device_writer(host) as writer, a_client(host) as reader:
        handle = await sealed(writer)
        slab, last = await watch_all(reader, handle, "r")
        assert {extent.kind for extent in slab.slab.extents} == {pb.MEMORY_KIND_DEVICE}
        assert last.closed.num_blocks == 2
        grant = await RegionClient(host.socket).fetch(writer.region_id, "device")
        assert (grant.kind, grant.num_bytes, grant.num_slots) == ("device", NUM_SLOTS * BLOCK_BYTES, NUM_SLOTS)
        assert [os.fstat(fd).st_ino for fd in grant.fds] == [os.fstat(fd).st_ino for fd in writer.fds]
        generations = SharedRegion.map_read_only(os.dup(grant.fd), NUM_SLOTS, grant.generations_offset)
        writer.region.next_generation(1)
        assert [generations.generation(slot) for slot in (0, 1)] == [0, 1]
        generations.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(grant.fd, b"12345678", 0)  # readers get the generations read-only
        close(grant)
        await reader.release(handle, "r")
        await until(lambda: nothing_is_left(host))


async def test_a_reader_that_does_not_ask_for_device_memory_gets_none(tmp_path: Path) -> None:
    """As a worker of release 0.2 does: its fetch names no kind."""
    async with running_host(tmp_path) as host, device_writer(host) as writer:
        files = OpenFiles()
        with pytest.raises(Unsupported, match=f"is in MEMORY_KIND_DEVICE, the reader maps MEMORY_KIND_HOST; {REMEDY}"):
            await RegionClient(host.socket).fetch(writer.region_id)
        with pytest.raises(Unsupported, match="is in MEMORY_KIND_HOST, the reader maps MEMORY_KIND_DEVICE"):
            await RegionClient(host.socket).fetch(host.arena.region_id, "device")
        await until(lambda: files.num_more() == 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_fd": None}, "kind"),
        ({"num_slots": NUM_SLOTS + 1000}, "has no room for 1016 generations"),
        ({"generations_offset": 8}, "has no room for 16 generations at 8"),
        ({"num_bytes": NUM_SLOTS * BLOCK_BYTES - 1}, "the slots reach past the end"),
    ],
)
async def test_an_offer_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    async with running_host(tmp_path) as host, device_writer(host) as writer:
        files = OpenFiles()
        other = RegionClient(host.socket)
        writer.region_id += "-2"
        writer.regions, kept = other, writer.regions
        if changes == {"memory_fd": None}:  # a region in host memory, whose bytes are not there
            message = "the slots reach past the end"
        with pytest.raises(InvalidRequest, match=message):
            await writer.lend(**changes)
        writer.regions = kept
        await until(lambda: files.num_more() == 0)


async def test_descriptors_and_kind_must_agree(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, device_writer(host) as writer:
        connection = await PacketSocket.connect(host.socket)
        offer = {"op": "offer", "region_id": "r", "incarnation": "i", "num_bytes": 8, "num_slots": 1}
        offer |= {"bytes_per_slot": 8, "generations_offset": 0}
        for kind, fds in (("device", 1), ("host", 2), ("disk", 2)):
            await connection.send({**offer, "kind": kind}, *[writer.region.fd] * fds)
            received = await connection.receive()
            assert received is not None and "kind" in received[0]["error"]["message"], (kind, received)
        connection.close()


async def test_extents_outside_the_region_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, device_writer(host) as writer:
        handle = writer.handle(num_blocks=1)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        outside, late, host_memory, disk = (writer.slab(0, 0, [1]) for _ in range(4))
        outside.extents[0].offset = writer.num_bytes
        late.extents[0].slot = NUM_SLOTS
        host_memory.extents[0].kind = pb.MEMORY_KIND_HOST
        disk.extents[0].kind = pb.MEMORY_KIND_DISK
        for slab, message in (
            (outside, "is outside region"),
            (late, "is outside region"),
            (host_memory, "an extent in MEMORY_KIND_HOST, region .* is in MEMORY_KIND_DEVICE"),
            (disk, "MEMORY_KIND_DISK"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await writer.client.seal(handle, [slab])


async def test_bytes_of_device_memory_are_refused_by_name(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, device_writer(host) as writer, a_client(host) as reader:
        handle = await sealed(writer)
        slab = (await watch_all(reader, handle, "r"))[0].slab
        with pytest.raises(Unsupported, match=f"is in MEMORY_KIND_DEVICE, which only engines of its host.*{REMEDY}"):
            await reader.read(handle, "r", slab, memoryview(bytearray(2 * BLOCK_BYTES)))
        with pytest.raises(Unsupported, match=f"is in MEMORY_KIND_DEVICE.*{REMEDY}"):
            await writer.client.publish(published(writer, chain(2), [0, 1]))


async def test_a_reader_of_another_host_gets_the_refusal_and_nothing_stays(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path) as near,
        running_host(tmp_path) as far,
        device_writer(near) as writer,
        a_client(far) as reader,
    ):
        handle = await sealed(writer)
        with pytest.raises(Unsupported, match=f"MEMORY_KIND_DEVICE.*{REMEDY}"):
            await watch_all(reader, handle, "r")
        await reader.release(handle, "r")
        await until(lambda: nothing_is_left(near) and nothing_is_left(far))


async def test_checksums_of_device_memory_are_left_to_the_readers(tmp_path: Path) -> None:
    async with running_host(tmp_path, verify_kv=True) as host, device_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(num_blocks=1)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        slab = writer.slab(0, 0, [0])
        slab.checksums.append(77)
        await writer.client.seal(handle, [slab], closed(1))
        assert list((await watch_all(reader, handle, "r"))[0].slab.checksums) == [77]


async def test_a_dead_owners_memory_is_given_up_and_its_handles_end(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, a_client(host) as reader:
        files = OpenFiles()
        async with device_writer(host) as writer:
            (row,) = (await host.service.Tables(TablesRequest(max_rows=10), None)).regions
            assert (row.kind, row.num_bytes) == (pb.MEMORY_KIND_DEVICE, NUM_SLOTS * BLOCK_BYTES)
            assert host.host_cache.blocks.allocator.total_bytes == 1 << 20, "device pools do not enlarge the store"
            handle = writer.handle(num_blocks=2)
            await writer.client.reserve(handle, writer.region_id, a_layout())
            watching = asyncio.create_task(watch_all(reader, handle, "r"))
            await until(lambda: any(record.watching["r"] for record in host.store.live()))
            await writer.die()
            with pytest.raises(Unavailable, match="is gone"):
                await watching
            with pytest.raises(KvNotFound):
                await RegionClient(host.socket).fetch(writer.region_id, "device")
        await until(lambda: nothing_is_left(host) and files.num_more() <= 2)  # reader's own connection


async def test_messages_of_host_memory_are_those_of_release_0_2(tmp_path: Path, monkeypatch: Any) -> None:
    packets: list[dict[str, Any]] = []
    real = socket.socket.sendmsg

    class Recording(socket.socket):
        def sendmsg(self, buffers: Any, *rest: Any) -> int:
            packets.append(json.loads(b"".join(buffers)))
            return real(self, buffers, *rest)

    async with running_host(tmp_path) as host:
        monkeypatch.setattr("tandem_runtime.kv.packets.socket.socket", Recording)
        writer = Writer(host.socket, host.address, host.incarnation)
        await writer.lend()
        close(await RegionClient(host.socket).fetch(writer.region_id))
        await writer.close()
    sizes = ["num_bytes", "num_slots"]
    assert [list(packet) for packet in packets if "op" in packet] == [
        ["op", "region_id", "incarnation", *sizes, "bytes_per_slot", "generations_offset"],
        ["op", "region_id"],
    ]


async def test_a_service_that_answers_with_another_kind_is_not_believed(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    listener.setblocking(False)

    async def serve() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        connection = PacketSocket(sock)
        await connection.receive()
        fd = os.memfd_create("test")
        await connection.send({"ok": True, "num_bytes": 1, "num_slots": 1, "generations_offset": 0}, fd, fd)
        os.close(fd)
        connection.close()

    files = OpenFiles()
    serving = asyncio.create_task(serve())
    with pytest.raises(TandemError, match="invalid grant of region r: 2 descriptors of kind None, asked was device"):
        await RegionClient(str(tmp_path / "s")).fetch("r", "device")
    await serving
    assert files.num_more() == 0
    listener.close()
