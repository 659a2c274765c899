"""Starts real KV services of emulated hosts, a pool of blocks, and an engine-like reader."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.served import ROOT
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_client.cli.parent_death import die_with_parent
from tandem_engine.execution.block_checksums import BlockChecksums
from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache
from tandem_engine.execution.model_runner import ModelRunner
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.ops.torch_ops import TorchOps
from tandem_runtime.identity import new_incarnation
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.regions import RegionClient
from tandem_runtime.kv.signatures import HandleSigner
from tandem_runtime.server import GrpcServer

BLOCK_BYTES = 256 << 10
BLOCK_TOKENS = 16
LAYOUT = pb.KvLayout(
    version=1,
    groups=[
        pb.KvGroup(
            kind=pb.KV_GROUP_KIND_FULL,
            layers=range(8),
            tokens_per_block=BLOCK_TOKENS,
            num_kv_heads=8,
            k_head_size=64,
            v_head_size=64,
            dtype="float16",
            order="layer,kv,head,token,dim",
            bytes_per_block=BLOCK_BYTES,
        )
    ],
    shard=pb.KvShard(tp_size=1),
)
SIGNER = HandleSigner(secrets.token_bytes(32))
KEYS = KvKeys((SIGNER.public_key,), secrets.token_bytes(32))
_START_SECONDS = 60.0
_SPARE_BYTES = 8 << 20


class ControlPlane(cp_grpc.ControlPlaneServiceServicer):
    """As much of one as a KV service needs: it gives out the keys and hears who is there."""

    def __init__(self) -> None:
        self.services: dict[str, asyncio.Future[pb.WorkerInfo]] = {}

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        waiting = self.services[request.info.worker_id]
        if not waiting.done():
            waiting.set_result(request.info)
        return cp.RegisterReply(heartbeat_interval_ms=5000, handle_public_keys=KEYS.public_keys, link_key=KEYS.link_key)

    async def Heartbeats(
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> AsyncIterator[cp.HeartbeatReply]:
        async for request in requests:
            yield await self.Heartbeat(request, context)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        return cp.HeartbeatReply(known=True)

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        return cp.ListWorkersReply()


class KvHost:
    """One KV service in a process of its own, and a client of it."""

    def __init__(self, info: pb.WorkerInfo, pid: int) -> None:
        self.info = info
        self.pid = pid
        self.client = KvClient(info.address, new_incarnation())
        self.regions = RegionClient(info.kv_socket)

    async def until_empty(self) -> None:
        """Wait until nothing of the transfer before is kept here."""
        while True:
            load = (await self.client.stats()).load.kv_service
            if load.num_handles == 0 and load.arena_free_bytes == load.arena_bytes:
                return
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        await self.regions.close()
        await self.client.close()


@asynccontextmanager
async def kv_hosts(
    folder: Path, largest_bytes: int, flags: Mapping[str, Sequence[str]]
) -> AsyncIterator[dict[str, KvHost]]:
    """Run a KV service for each name in `flags`, as the only service of a host of that name."""
    plane = ControlPlane()
    server = GrpcServer(
        "127.0.0.1:0",
        lambda grpc_server: cp_grpc.add_ControlPlaneServiceServicer_to_server(plane, grpc_server),
        ["tandem.v1.ControlPlaneService"],
    )
    control = await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        hosts: dict[str, KvHost] = {}
        for name, more in flags.items():
            plane.services[name] = asyncio.get_running_loop().create_future()
            arena = ["--arena-bytes", str(largest_bytes + _SPARE_BYTES), "--store-bytes", "0"]
            place = [
                "--control",
                control,
                "--worker-id",
                name,
                "--host-id",
                name,
                "--drain-seconds",
                "1",
                "--insecure-plaintext",
            ]
            process = await stack.enter_async_context(_running(folder, [*place, *arena, *more]))
            info = await asyncio.wait_for(plane.services[name], _START_SECONDS)
            hosts[name] = KvHost(info, process.pid)
            stack.push_async_callback(hosts[name].close)
        yield hosts


@asynccontextmanager
async def _running(folder: Path, flags: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OTEL_"))}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    with (folder / "kv-services.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *die_with_parent([sys.executable, "-m", "kv_transfer_svc", *flags]),
            env={**kept, "PYTHONPATH": paths, "TANDEM_RUNTIME_DIR": str(folder), "TANDEM_STATE_DIR": str(folder)},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class Pool:
    """A prefill worker's pool in shared memory, lent to its host's service; a prompt lies in its first blocks."""

    def __init__(self, host: KvHost, largest_bytes: int) -> None:
        self.host = host
        self.region_id = f"pool-{new_incarnation()}"
        self._cache = engine_pool(largest_bytes)
        self._checksums = BlockChecksums(self._cache)
        self.memory = self._cache.region.bytes_at(0, largest_bytes).data
        self._num_writes = 0

    async def lend(self) -> None:
        region = self._cache.region
        await self.host.regions.offer(
            self.region_id,
            self.host.client.incarnation,
            region.num_bytes,
            self._cache.num_blocks,
            BLOCK_BYTES,
            self._cache.generations_offset,
            region.fd,
        )

    def write(self, num_bytes: int) -> None:
        """Fill the first blocks with something new, as an engine that computes."""
        self._num_writes += 1
        self.memory[:num_bytes] = bytes([self._num_writes % 255 + 1]) * num_bytes

    def copy_in(self, content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Copy what was computed elsewhere into the first blocks."""
        self._cache.write_blocks(0, content)

    async def reserve(self, num_bytes: int) -> pb.KvHandle:
        """Open a handle for that many bytes."""
        info = self.host.info
        handle = pb.KvHandle(
            handle_id=secrets.token_bytes(16),
            request_id=f"bench-{self._num_writes}",
            attempt=1,
            prefill_incarnation=self.host.client.incarnation,
            holder_address=info.address,
            holder_incarnation=info.incarnation,
            layout_digest=layout_digest(LAYOUT),
            num_tokens=num_bytes // BLOCK_BYTES * BLOCK_TOKENS,
            num_readers=1,
            deadline_unix_ms=int((time.time() + 60) * 1000),
        )
        handle = SIGNER.sign(handle)
        await self.host.client.reserve(handle, self.region_id, LAYOUT)
        return handle

    async def seal(self, handle: pb.KvHandle, num_bytes: int, *, checksums: bool = False) -> kv.Slab:
        """Seal the handle as one slab, which is returned, and close it."""
        blocks = range(num_bytes // BLOCK_BYTES)
        extents = [
            pb.Extent(
                kind=pb.MEMORY_KIND_HOST,
                region_id=self.region_id,
                offset=slot * BLOCK_BYTES,
                num_bytes=BLOCK_BYTES,
                slot=slot,
                generation=self._cache.generations[slot],
            )
            for slot in blocks
        ]
        slab = kv.Slab(num_blocks=len(blocks), num_layers=8, extents=extents)
        if checksums:
            slab.checksums.extend(self._checksums.of(blocks))
        closed = kv.Closed(num_blocks=len(blocks), first_tokens=[kv.FirstToken(token_id=1)])
        await self.host.client.seal(handle, [slab], closed)
        return slab

    def forget(self, num_bytes: int) -> None:
        """Give the slots up, as an engine that reuses them."""
        for slot in range(num_bytes // BLOCK_BYTES):
            self._cache.generations[slot] += 1


def engine_pool(num_bytes: int) -> PagedKVCache:
    """Return an engine's pool of blocks as LAYOUT says."""
    geometry = KVGeometry(num_layers=8, num_kv_heads=8, head_dim=64, block_size=BLOCK_TOKENS, dtype=torch.float16)
    assert geometry.bytes_per_block == BLOCK_BYTES, "as LAYOUT says"
    return PagedKVCache(geometry, num_bytes // BLOCK_BYTES, torch.device("cpu"))


class _NoModel:
    """For runners that only move blocks."""

    is_batch_invariant = True

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is computed here")


class EngineReader:
    """A decode worker: watches at its host's service; slabs are copied by the engine's own code into its own pool."""

    def __init__(self, host: KvHost, largest_bytes: int) -> None:
        self.host = host
        self._cache = engine_pool(largest_bytes)
        self.pool = self._cache.region.bytes_at(0, largest_bytes).data
        self._plain = ModelRunner(_NoModel(), TorchOps(), self._cache)
        self._verifying = ModelRunner(_NoModel(), TorchOps(), self._cache, BlockChecksums(self._cache))

    async def map(self, region_id: str) -> None:
        """Once per region, as a worker does when it first hears of one."""
        grant = await self.host.regions.fetch(region_id)
        command = MapRegion(region_id, grant.num_bytes, grant.num_slots, grant.generations_offset)
        for runner in (self._plain, self._verifying):
            runner.map_region(command, grant.fd)
        os.close(grant.fd)

    async def watch(self, handle: pb.KvHandle, *, copies: bool) -> tuple[kv.Slab, str]:
        """Return the one slab, copied as soon as it can be read here if `copies`, and how it came."""
        slab, came_by = kv.Slab(), ""
        async for event in self.host.client.watch(handle, "reader", LAYOUT):
            if event.HasField("slab"):
                slab, came_by = event.slab, event.transport
                if copies:
                    self.copy(slab)
        return slab, came_by

    def copy(self, slab: kv.Slab) -> None:
        """Copy every block into the pool; those with checksums are compared."""
        checksums = slab.checksums or [0] * len(slab.extents)
        extents = [
            ExtentRef(extent.region_id, extent.offset, extent.num_bytes, extent.slot, extent.generation, checksum)
            for extent, checksum in zip(slab.extents, checksums, strict=True)
        ]
        runner = self._verifying if slab.checksums else self._plain
        runner.import_blocks(range(len(extents)), extents)
