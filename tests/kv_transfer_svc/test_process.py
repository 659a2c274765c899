"""Tests of the service as a process: it registers, serves, drains on SIGTERM and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc.process import KvProcess
from kv_transfer_svc.settings import KvSettings
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest, Unauthenticated
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.mac import sign_handle
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.server import GrpcServer
from tests.kv_transfer_svc.host import closed
from tests.kv_transfer_svc.layout import BLOCK_BYTES, KEYS, SIGNER, a_layout
from tests.kv_transfer_svc.writer import Writer


class ControlPlane(cp_grpc.ControlPlaneServiceServicer):
    """Returns the keys and records the calls."""

    def __init__(self) -> None:
        self.reply = cp.RegisterReply(handle_public_keys=KEYS.public_keys, link_key=KEYS.link_key)
        self.registered: asyncio.Queue[pb.WorkerInfo] = asyncio.Queue()
        self.loads: asyncio.Queue[pb.LoadReport] = asyncio.Queue()
        self.deregistered: asyncio.Queue[str] = asyncio.Queue()
        self._known: set[str] = set()

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        self._known.add(request.info.incarnation)
        self.registered.put_nowait(request.info)
        self.reply.heartbeat_interval_ms = 50
        return self.reply

    async def Heartbeats(
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> AsyncIterator[cp.HeartbeatReply]:
        async for request in requests:
            yield await self.Heartbeat(request, context)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        self.loads.put_nowait(request.load)
        return cp.HeartbeatReply(known=request.incarnation in self._known)

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        self.deregistered.put_nowait(request.incarnation)
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        return cp.ListWorkersReply()


def paths_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir()]


@contextlib.asynccontextmanager
async def running_process(folder: Path, control: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "TANDEM_RUNTIME_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kv_transfer_svc",
        "--control",
        control,
        "--arena-bytes",
        "1048576",
        "--insecure-plaintext",
        *flags,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def control() -> AsyncIterator[tuple[ControlPlane, str]]:
    plane = ControlPlane()
    server = GrpcServer(
        "127.0.0.1:0",
        lambda grpc_server: cp_grpc.add_ControlPlaneServiceServicer_to_server(plane, grpc_server),
        ["tandem.v1.ControlPlaneService"],
    )
    address = await server.start()
    yield plane, address
    await server.stop(0)


async def test_it_registers_serves_a_hand_over_and_drains(tmp_path: Path, control: tuple[ControlPlane, str]) -> None:
    plane, address = control
    async with running_process(tmp_path, address, "--host-id", "h1") as process:
        # 1. the service registers with its role and address
        info = await plane.registered.get()
        assert (info.role, info.host_id) == (pb.WORKER_ROLE_KV, "h1")
        assert [info.kv_socket] == paths_in(tmp_path)
        # 2. a worker lends a region and seals a prompt
        writer = Writer(info.kv_socket, info.address, info.incarnation)
        await writer.lend()
        handle = SIGNER.sign(writer.handle(num_blocks=2))
        await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1])], closed(2))
        # 3. the heartbeat reports the handle
        while (load := await plane.loads.get()).kv_service.num_handles == 0:
            pass
        assert (load.state, load.kv_service.num_regions) == (pb.WORKER_STATE_READY, 1)
        while (load := await plane.loads.get()).kv_service.leased_bytes == 0:
            pass
        assert load.kv_service.leased_bytes == 2 * BLOCK_BYTES
        assert load.kv_service.arena_free_bytes == load.kv_service.arena_bytes == 1 << 20
        # 4. while draining, the service waits for its handle
        process.send_signal(signal.SIGTERM)
        while (await plane.loads.get()).state != pb.WORKER_STATE_DRAINING:
            pass
        reader = KvClient(info.address, "reader")
        events = [event async for event in reader.watch(handle, "r", a_layout())]
        assert [event.WhichOneof("kind") for event in events] == ["slab", "closed"]
        assert await reader.release(handle, "r") is HandleState.RELEASED
        # 5. the service deregisters and exits
        assert await process.wait() == 0
        assert await plane.deregistered.get() == info.incarnation
        assert paths_in(tmp_path) == []
        await reader.close()
        await writer.close()


async def test_handles_of_a_killed_service_come_back_to_their_owner(
    tmp_path: Path, control: tuple[ControlPlane, str]
) -> None:
    plane, address = control
    async with running_process(tmp_path, address) as process:
        first = await plane.registered.get()
        writer = Writer(first.kv_socket, first.address, first.incarnation, lease_seconds=0.3)
        await writer.lend()
        handle = writer.handle()
        await writer.client.reserve(handle, writer.region_id, a_layout())
        process.kill()
        await process.wait()
    while not plane.loads.empty():  # reports of the first service have the region, too
        plane.loads.get_nowait()
    async with running_process(tmp_path, address, "--listen", first.address):
        second = await plane.registered.get()
        assert second.incarnation != first.incarnation
        await writer.regions.move(second.kv_socket)
        ended = await anext(writer.client.own(writer.region_id))
        assert ended.handle_id == handle.handle_id
        while (await plane.loads.get()).kv_service.num_regions == 0:
            pass
        handle = writer.handle()
        handle.holder_incarnation = second.incarnation
        await writer.client.reserve(SIGNER.sign(handle), writer.region_id, a_layout())
        await writer.close()


@pytest.mark.parametrize("flags", [(), ("--hmac-handles-until", "2999-12-31")], ids=["as it is", "during an upgrade"])
async def test_handles_of_a_gateway_of_release_0_2_are_accepted_with_the_setting_only(
    tmp_path: Path, control: tuple[ControlPlane, str], flags: tuple[str, ...]
) -> None:
    plane, address = control
    plane.reply = cp.RegisterReply(handle_key=b"the handle key of the fleet")
    async with running_process(tmp_path, address, *flags):
        info = await plane.registered.get()
        writer = Writer(info.kv_socket, info.address, info.incarnation)
        await writer.lend()
        handle = writer.handle(num_blocks=2)
        handle.ClearField("signature")
        handle = sign_handle(handle, plane.reply.handle_key)
        if flags:
            await writer.client.reserve(handle, writer.region_id, a_layout())
            await writer.client.release_all(handle)
        else:
            with pytest.raises(Unauthenticated, match="--hmac-handles-until"):
                await writer.client.reserve(handle, writer.region_id, a_layout())
        await writer.close()


async def test_a_bad_setting_is_refused_with_a_remedy(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kv_transfer_svc",
        "--arena-bytes",
        "5",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"--arena-bytes 5 is too small; give at least 1048576" in stderr


async def test_memory_is_taken_and_given_back_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of a GB takes a second, in which the loop must go on."""
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))
    reserve, close = SharedRegion.reserve, SharedRegion.close
    names: dict[SharedRegion, str] = {}
    on_loop: dict[tuple[str, str], bool] = {}

    def note(what: str, name: str) -> None:
        on_loop[what, name] = threading.current_thread() is threading.main_thread()

    def noted_reserve(name: str, num_bytes: int, num_slots: int) -> SharedRegion:
        note("reserve", name)
        region = reserve(name, num_bytes, num_slots)
        names[region] = name
        return region

    def noted_close(region: SharedRegion) -> None:
        note("close", names.get(region, ""))
        close(region)

    monkeypatch.setattr(SharedRegion, "reserve", noted_reserve)
    monkeypatch.setattr(SharedRegion, "close", noted_close)
    process = await KvProcess.create(
        KvSettings(control=(), insecure_plaintext=True, arena_bytes=1 << 20, store_bytes=1 << 20)
    )
    drain = asyncio.Event()
    drain.set()
    assert await process.run(drain) == 0
    large = ("tandem-kv-arena", "tandem-kv-blocks")
    assert {key: value for key, value in on_loop.items() if key[1] in large} == {
        (what, name): False for what in ("reserve", "close") for name in large
    }


def test_a_region_is_populated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python keeps the interpreter lock in madvise: all of a large region at once would stop every thread."""
    monkeypatch.setattr("tandem_runtime.kv.shared_region._POPULATE_BYTES", 8192)
    region = SharedRegion.create("test", 5 * 4096, 3)
    region.view(0, 5 * 4096)[:] = bytes(range(256)) * 80
    assert region.generation(2) == 0
    region.close()


async def test_a_wrong_folder_for_sockets_is_refused_before_the_service_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path / "file"))
    settings = KvSettings(control=("127.0.0.1:1",), state_dir=str(tmp_path / "state"))
    with pytest.raises(InvalidRequest, match="TANDEM_RUNTIME_DIR"):
        await asyncio.wait_for(KvProcess.create(settings), 10)
