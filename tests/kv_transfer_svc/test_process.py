"""Tests of the service as a process: it registers, serves, drains on SIGTERM and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.mac import sign_handle
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.server import GrpcServer
from tests.kv_transfer_svc.host import closed
from tests.kv_transfer_svc.layout import BLOCK_BYTES, KEY, a_layout
from tests.kv_transfer_svc.writer import Writer


class ControlPlane(cp_grpc.ControlPlaneServiceServicer):
    """Returns the handle key and records the calls."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[pb.WorkerInfo] = asyncio.Queue()
        self.loads: asyncio.Queue[pb.LoadReport] = asyncio.Queue()
        self.deregistered: asyncio.Queue[str] = asyncio.Queue()
        self._known: set[str] = set()

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        self._known.add(request.info.incarnation)
        self.registered.put_nowait(request.info)
        return cp.RegisterReply(heartbeat_interval_ms=50, handle_key=KEY)

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
        handle = sign_handle(writer.handle(num_blocks=2), KEY)
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
        await writer.client.reserve(sign_handle(handle, KEY), writer.region_id, a_layout())
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
