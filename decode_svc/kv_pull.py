"""Copies the slabs of a handle into the engine's pool, from shared memory or over gRPC."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from decode_svc.handle_layout import HandleLayout
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.errors import DeadlineExceeded, InternalError, KvCorrupt
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.regions import RegionKind
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.requests import ActiveRequest


class SlabCopier:
    """Has the engine copy slabs from other processes' regions, and tracks the copies under way."""

    def __init__(
        self,
        engine: EngineLink,
        regions: EngineRegions,
        transport: Literal["auto", "shm", "grpc"],
    ) -> None:
        self.transport = transport
        self.regions = regions
        self._engine = engine
        self._copies: dict[tuple[str, int], SlabCopy] = {}
        self._num_staged = 0

    def copy(
        self, request: ActiveRequest, slab: kv.Slab, first_block: int, layout: messages.SourceLayout | None = None
    ) -> SlabCopy:
        """Have the engine copy a slab's blocks, from `first_block` on, before any command sent after this.

        The engine converts blocks of another `layout`, in which `first_block` counts.
        """
        skipped = max(0, first_block - slab.first_block)
        checksums = slab.checksums or [0] * len(slab.extents)
        extents = [
            messages.ExtentRef(each.region_id, each.offset, each.num_bytes, each.slot, each.generation, checksum)
            for each, checksum in list(zip(slab.extents, checksums, strict=True))[skipped:]
        ]
        copy = SlabCopy(request, asyncio.get_running_loop().create_future(), [each.region_id for each in extents])
        if extents:
            self._copies[request.key, slab.index] = copy
            first = slab.first_block + skipped
            self._engine.send(messages.ImportSlab(request.key, slab.index, first, extents, slab.group, layout))
        else:
            copy.done.set_result(None)
        return copy

    def on_imported(self, imported: messages.SlabImported) -> None:
        copy = self._copies.pop((imported.request_id, imported.slab_index), None)
        if copy is None or copy.done.done():
            return
        if imported.error:
            self.regions.unmap(copy.region_ids)  # the engine may have failed to map one: map it again for the next copy
            copy.done.set_exception(KvCorrupt(imported.error))
        else:
            copy.request.ledger.num_bytes_pulled += imported.num_bytes
            copy.request.ledger.transfer_end_ns = time.time_ns()
            copy.done.set_result(None)

    def forget(self, request: ActiveRequest) -> None:
        """Stop waiting for the copies of a request that has ended."""
        for key in [key for key in self._copies if key[0] == request.key]:
            done = self._copies.pop(key).done
            if not done.done():
                done.set_result(None)

    async def copy_over_grpc(
        self,
        client: KvClient,
        request: ActiveRequest,
        slab: kv.Slab,
        first_block: int,
        layout: messages.SourceLayout | None = None,
    ) -> None:
        """Read a slab from the KV service in chunks into a staging region, and have the engine copy it from there."""
        skipped = max(0, first_block - slab.first_block)
        sizes = [extent.num_bytes for extent in slab.extents[skipped:]]
        if not sizes:
            return
        self._num_staged += 1
        region_id = f"staged-{os.getpid()}-{self._num_staged}"
        with _StagingRegion(sizes) as staged:
            submit = request.submit
            await client.read(submit.handle, submit.request_id, slab, staged.view, slab.first_block + skipped)
            self._engine.send(staged.map_command(region_id), staged.fd)
            try:
                part = staged.slab(slab, region_id, slab.first_block + skipped)
                await self.copy(request, part, first_block, layout).done
            finally:
                self._engine.send(messages.UnmapRegion(region_id))


@dataclass(frozen=True)
class SlabCopy:
    """A copy of one slab into the engine's pool; `done` raises KvCorrupt if the bytes differ from the sealed ones."""

    request: ActiveRequest
    done: asyncio.Future[None]
    region_ids: list[str]


class _StagingRegion:
    """A region of this process that holds one slab, in the layout of a worker's pool."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._region = SharedRegion.create("tandem-staged", sum(sizes), len(sizes))
        self.view = self._region.view(0, sum(sizes))

    def __enter__(self) -> _StagingRegion:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        traceback.clear_frames(trace)  # views in the frames of a failed read would keep the mapping open
        self.view.release()
        self._region.close()

    @property
    def fd(self) -> int:
        return self._region.fd

    def map_command(self, region_id: str) -> messages.MapRegion:
        region = self._region
        return messages.MapRegion(region_id, region.total_bytes, region.num_slots, region.generations_offset)

    def slab(self, slab: kv.Slab, region_id: str, first_block: int) -> kv.Slab:
        """Return `slab` from `first_block` on, with extents in this region; slots are never reused: generation 0."""
        skipped = first_block - slab.first_block
        staged = kv.Slab(
            index=slab.index,
            group=slab.group,
            first_block=first_block,
            num_blocks=len(self._sizes),
            checksums=slab.checksums[skipped:],
        )
        offset = 0
        for slot, size in enumerate(self._sizes):
            staged.extents.add(
                kind=pb.MEMORY_KIND_HOST, region_id=region_id, offset=offset, num_bytes=size, slot=slot, generation=0
            )
            offset += size
        return staged


class KVPull:
    """Pulls the blocks of one handle, and writes bytes, transport and times into the request's ledger."""

    def __init__(
        self, request: ActiveRequest, layout: HandleLayout, num_cached_tokens: int, copier: SlabCopier
    ) -> None:
        """`num_cached_tokens`: leading tokens that the engine has."""
        self._request = request
        self._layout = layout
        self._first_block = layout.first_block(num_cached_tokens)
        self._copier = copier
        self._copies: list[SlabCopy] = []
        self._windows: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()
        """Windows to acknowledge: the number of slabs up to each, and its copy. The KV service's memory bounds them."""

    async def run(self, client: KvClient) -> kv.FirstToken:
        """Return our choice's first token once every block is being copied; raises TandemError on failure.

        The engine copies in the order of its commands, so decoding may start before the copies have finished. The
        engine computes the blocks whose copy fails. `wait_copied` waits for the copies.
        """
        try:
            async with asyncio.timeout(max(0.0, self._request.seconds_left)):
                closed = await self._pull_and_acknowledge(client)
        except TimeoutError as error:
            raise DeadlineExceeded("the prompt's KV cache did not come before the request's deadline") from error
        self._request.ledger.transfer_end_ns = time.time_ns()  # a copy that ends later moves this time
        choice_index = self._request.submit.choice_index
        if choice_index >= len(closed.first_tokens):
            raise InternalError(f"the seal has {len(closed.first_tokens)} first tokens, none for choice {choice_index}")
        return closed.first_tokens[choice_index]

    async def wait_copied(self) -> None:
        """Return once the engine no longer reads the handle's memory; raises KvCorrupt."""
        copies = [copy.done for copy in self._copies]
        if copies:
            await asyncio.wait(copies)  # unlike gather, a caller that times out does not cancel the copies
        for error in [error for copy in copies if (error := copy.exception()) is not None]:
            raise error

    async def _pull_and_acknowledge(self, client: KvClient) -> kv.Closed:
        """Pull; meanwhile tell the KV service which windows our engine has copied, or no further ones would come."""
        pulling = asyncio.ensure_future(self._pull(client))
        acknowledging = asyncio.ensure_future(self._acknowledge(client))
        try:
            await asyncio.wait((pulling, acknowledging), return_when=asyncio.FIRST_COMPLETED)
            if not pulling.done():
                acknowledging.result()  # raises: it ends with an error only
            return pulling.result()
        finally:
            for task in (pulling, acknowledging):
                task.cancel()
            await asyncio.gather(pulling, acknowledging, return_exceptions=True)

    async def _acknowledge(self, client: KvClient) -> None:
        """Acknowledge each window, in order, once our engine has copied it, until cancelled; raises KvCorrupt."""
        submit = self._request.submit
        while True:
            num_slabs, copied = await self._windows.get()
            await asyncio.wait((copied,))
            copied.result()
            await client.acknowledge(submit.handle, submit.request_id, num_slabs)

    async def _pull(self, client: KvClient) -> kv.Closed:
        submit, ledger = self._request.submit, self._request.ledger
        left, layout = self._request.seconds_left, self._layout.layout
        watch = client.watch(
            submit.handle, submit.request_id, layout, self._first_block, seconds_left=left, acknowledges=True
        )
        async with aclosing(watch) as events:
            async for event in events:
                if event.HasField("closed"):
                    return event.closed
                ledger.transfer_start_ns = ledger.transfer_start_ns or time.time_ns()
                ledger.transport = "grpc" if self._copier.transport == "grpc" else event.transport
                await self._copy(client, event.slab)
                if event.is_window:
                    self._windows.put_nowait((event.slab.index + 1, self._last_copy()))
        raise InternalError("the KV service ended its Watch without closing the handle")

    def _last_copy(self) -> asyncio.Future[None]:
        """Return the copy of the last slab; over gRPC it has ended."""
        if self._copies:
            return self._copies[-1].done
        ended = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        return ended

    async def _copy(self, client: KvClient, slab: kv.Slab) -> None:
        source = self._layout.source
        if self._copier.transport == "grpc":
            await self._copier.copy_over_grpc(client, self._request, slab, self._first_block, source)
            return
        for copy in self._copies:
            if copy.done.done():
                copy.done.result()  # raises if the copy failed: the other slabs are useless then
        kind: RegionKind = "device" if slab.extents[0].kind == pb.MEMORY_KIND_DEVICE else "host"
        await self._copier.regions.map((extent.region_id for extent in slab.extents), kind)
        self._copies.append(self._copier.copy(self._request, slab, self._first_block, source))
