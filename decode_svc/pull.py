"""How are one handle's slabs copied into the engine's pool?"""

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

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.errors import DeadlineExceeded, InternalError, KvCorrupt
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.shared_region import SharedRegion
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_regions import EngineRegions
from tandem_worker.requests import ActiveRequest


class RegionReader:
    """Lets the engine read other processes' regions, and notes what has been copied."""

    def __init__(
        self,
        engine: EngineLink,
        regions: EngineRegions,
        transport: Literal["auto", "shm", "grpc"],
    ) -> None:
        self.transport = transport
        self.regions = regions
        self._engine = engine
        self._copies: dict[tuple[str, int], Copy] = {}
        self._num_staged = 0

    def copy(self, request: ActiveRequest, slab: kv.Slab, first_block: int) -> Copy:
        """Have the engine copy a slab's blocks, from `first_block` on, before any command that is sent after this."""
        skipped = max(0, first_block - slab.first_block)
        checksums = slab.checksums or [0] * len(slab.extents)
        extents = [
            messages.ExtentRef(each.region_id, each.offset, each.num_bytes, each.slot, each.generation, checksum)
            for each, checksum in list(zip(slab.extents, checksums, strict=True))[skipped:]
        ]
        copy = Copy(request, asyncio.get_running_loop().create_future(), [each.region_id for each in extents])
        if extents:
            self._copies[request.key, slab.index] = copy
            first = slab.first_block + skipped
            self._engine.send(messages.ImportSlab(request.key, slab.index, first, extents, slab.group))
        else:
            copy.done.set_result(None)
        return copy

    def imported(self, imported: messages.SlabImported) -> None:
        copy = self._copies.pop((imported.request_id, imported.slab_index), None)
        if copy is None or copy.done.done():
            return
        if imported.error:
            self.regions.unmap(copy.region_ids)  # or the engine could not map one: it is mapped anew for the next copy
            copy.done.set_exception(KvCorrupt(imported.error))
        else:
            copy.request.ledger.num_bytes_pulled += imported.num_bytes
            copy.request.ledger.transfer_end_ns = time.time_ns()
            copy.done.set_result(None)

    def forget(self, request: ActiveRequest) -> None:
        """The request is over, or the engine: nobody waits for its copies any more."""
        for key in [key for key in self._copies if key[0] == request.key]:
            done = self._copies.pop(key).done
            if not done.done():
                done.set_result(None)

    async def copy_over_grpc(self, client: KvClient, request: ActiveRequest, slab: kv.Slab, first_block: int) -> None:
        """Fetch a slab from the KV service as a stream of chunks into a region of our own, and copy it from there."""
        skipped = max(0, first_block - slab.first_block)
        sizes = [extent.num_bytes for extent in slab.extents[skipped:]]
        if not sizes:
            return
        self._num_staged += 1
        region_id = f"staged-{os.getpid()}-{self._num_staged}"
        with _Staged(sizes) as staged:
            submit = request.submit
            await client.read(submit.handle, submit.request_id, slab, staged.view, slab.first_block + skipped)
            self._engine.send(staged.map_command(region_id), staged.fd)
            try:
                await self.copy(request, staged.slab(slab, region_id, slab.first_block + skipped), first_block).done
            finally:
                self._engine.send(messages.UnmapRegion(region_id))


@dataclass(frozen=True)
class Copy:
    """One slab on its way into the engine's pool; `done` raises KvCorrupt if its bytes were not what was sealed."""

    request: ActiveRequest
    done: asyncio.Future[None]
    region_ids: list[str]


class _Staged:
    """A region of our own that holds one slab, of the same form as a worker's pool."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._region = SharedRegion.create("tandem-staged", sum(sizes), len(sizes))
        self.view = self._region.view(0, sum(sizes))

    def __enter__(self) -> _Staged:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        traceback.clear_frames(trace)  # views in a failed read's frames would keep the mapping from closing
        self.view.release()
        self._region.close()

    @property
    def fd(self) -> int:
        return self._region.fd

    def map_command(self, region_id: str) -> messages.MapRegion:
        region = self._region
        return messages.MapRegion(region_id, region.total_bytes, region.num_slots, region.generations_offset)

    def slab(self, slab: kv.Slab, region_id: str, first_block: int) -> kv.Slab:
        """Return `slab` from `first_block` on, as it lies here; nothing here is ever reused, so generations are 0."""
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


class Pull:
    """One handle, from Watch to the last block; the request's ledger says what was moved and when."""

    def __init__(self, request: ActiveRequest, layout: pb.KvLayout, first_block: int, reader: RegionReader) -> None:
        self._request = request
        self._layout = layout
        self._first_block = first_block
        self._reader = reader
        self._copies: list[Copy] = []

    async def run(self, client: KvClient) -> kv.FirstToken:
        """Return our choice's first token once every block is being copied; raises TandemError if that cannot be.

        The engine copies in the order in which it is asked, so it may be told to go on at once: it computes what turns
        out not to have come. `copied` says so.
        """
        try:
            async with asyncio.timeout(max(0.0, self._request.seconds_left)):
                closed = await self._pull(client)
        except TimeoutError as error:
            raise DeadlineExceeded("the prompt's KV cache did not come before the request's deadline") from error
        self._request.ledger.transfer_end_ns = time.time_ns()  # copies that are under way say when they are done
        choice_index = self._request.submit.choice_index
        if choice_index >= len(closed.first_tokens):
            raise InternalError(f"the seal has {len(closed.first_tokens)} first tokens, none for choice {choice_index}")
        return closed.first_tokens[choice_index]

    async def copied(self) -> None:
        """Return once the engine reads the handle's memory no more; raises KvCorrupt."""
        results = await asyncio.gather(*(copy.done for copy in self._copies), return_exceptions=True)
        for error in filter(None, results):
            raise error

    async def _pull(self, client: KvClient) -> kv.Closed:
        submit, ledger = self._request.submit, self._request.ledger
        watch = client.watch(submit.handle, submit.request_id, self._layout, self._first_block)
        async with aclosing(watch) as events:
            async for event in events:
                if event.HasField("closed"):
                    return event.closed
                ledger.transfer_start_ns = ledger.transfer_start_ns or time.time_ns()
                ledger.transport = "grpc" if self._reader.transport == "grpc" else event.transport
                await self._take(client, event.slab)
        raise InternalError("the KV service ended its Watch without closing the handle")

    async def _take(self, client: KvClient, slab: kv.Slab) -> None:
        if self._reader.transport == "grpc":
            await self._reader.copy_over_grpc(client, self._request, slab, self._first_block)
            return
        for copy in self._copies:
            if copy.done.done():
                copy.done.result()  # one that failed: the others are of no use
        await self._reader.regions.map(extent.region_id for extent in slab.extents)
        self._copies.append(self._reader.copy(self._request, slab, self._first_block))
