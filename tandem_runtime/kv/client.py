"""The client of a KV service, for workers and gateways.

Every call has a deadline and is repeated while the service cannot be reached; all calls are idempotent. The client
renews the lease of each handle that it reserved or watches, until the handle is released, aborted or has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import chain, repeat
from typing import TypeVar

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import KvCorrupt, StaleIncarnation, TandemError, Unavailable
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.leases import LeaseKeeper
from tandem_runtime.kv.receiving import checksums_in, fill_blocks, messages_of, split_blocks
from tandem_runtime.kv.seal_stream import SealStream, seal_request
from tandem_runtime.kv.slabs import first_missing_block
from tandem_runtime.kv.time_left import milliseconds
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

Reply = TypeVar("Reply")

MAX_BLOCKS_PER_CALL = 1024
"""Of a Load, a slab and a Seal. A KV service computes for some 10 ms; it refuses more than 4,096 blocks."""
CALL_SECONDS = 5.0
LEASE_SECONDS = 10.0
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)


def expected_service(member: FleetMember | None, id: str, address: str) -> Identity | Role:
    """Return who must answer as the KV service `id` at `address`, where a handle or a gateway has named both.

    Without a member any process may. Raise Unavailable if `id` is none of a certificate.
    """
    return "kv" if member is None else member.expected_or_role("kv", id, address)


class KvClient:
    """Calls one KV service on behalf of one process; `incarnation` is that process's."""

    def __init__(
        self,
        address: str,
        incarnation: str,
        *,
        call_seconds: float = CALL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        member: FleetMember | None = None,
        expect: Identity | Role = "kv",
    ) -> None:
        """With a `member`, the service must prove that it is `expect`: see `expected_service`."""
        self.address = address
        self.incarnation = incarnation
        self._call_seconds = call_seconds
        self._is_closed = False
        self._lease_seconds = lease_seconds
        self._channel = open_channel(address, member, expect)
        self._stub = kv_grpc.KvTransferServiceStub(self._channel)
        self._gone: asyncio.Queue[kv.OwnerEvent.Ended | kv.OwnerEvent.Copied | StaleIncarnation] = asyncio.Queue()
        self._leases = LeaseKeeper(self.renew, self._lost, lease_seconds / 3)

    # ---------------------------------------------------------------------------------------------- the writer

    async def reserve(
        self,
        handle: pb.KvHandle,
        region_id: str,
        layout: pb.KvLayout,
        seconds_left: float | None = None,
        max_held_bytes: int = 0,
    ) -> kv.ReserveReply:
        """Open a handle that this worker fills from its region, and keep renewing it until it is sealed or ends.

        `seconds_left`: until the handle's deadline, here and in the other calls; None: by the wall clocks.
        `max_held_bytes`: the most that the region holds of the handle at once; 0: all of it.
        """
        lease_ms = int(self._lease_seconds * 1000)
        request = kv.ReserveRequest(
            handle=handle,
            region_id=region_id,
            layout=layout,
            lease_ms=lease_ms,
            time_left_ms=milliseconds(seconds_left),
            max_held_bytes=max_held_bytes,
        )
        reply = await self._call(self._stub.Reserve, request)
        self._leases.hold(handle, "", seconds_left)
        return reply

    async def seal(self, handle: pb.KvHandle, slabs: Sequence[kv.Slab], closed: kv.Closed | None = None) -> HandleState:
        """Make slabs visible. With `closed` (num_blocks, first_tokens) these slabs are the last."""
        return HandleState((await self._call(self._stub.Seal, seal_request(handle, slabs, closed))).state)

    def seal_stream(self) -> SealStream:
        """Open a stream for the seals of one handle; the caller closes it."""
        return SealStream(
            self._stub.SealStream, lambda request: self._call(self._stub.Seal, request), self._call_seconds
        )

    async def own(self, region_id: str) -> AsyncGenerator[kv.OwnerEvent.Ended | kv.OwnerEvent.Copied, None]:
        """Yield each handle of the region that has ended, for as long as the caller iterates; and slabs, once copied.

        Survives broken streams and restarts of the service. A handle may come more than once. A handle that a restarted
        service has lost comes as EXPIRED. Waits until the region is offered. Raises
        StaleIncarnation.
        """
        listen = supervised("kv-owner-events", lambda: self._listen(region_id), longest_pause_seconds=1.0)
        listening = asyncio.create_task(listen, name=f"kv-owner-{region_id}")
        try:
            while True:
                gone = await self._gone.get()
                if isinstance(gone, TandemError):
                    raise gone
                yield gone
        finally:
            listening.cancel()

    # ---------------------------------------------------------------------------------------------- the reader

    async def watch(
        self,
        handle: pb.KvHandle,
        reader_id: str,
        layout: pb.KvLayout,
        first_block: int = 0,
        *,
        seconds_left: float | None = None,
        acknowledges: bool = False,
    ) -> AsyncGenerator[kv.WatchEvent, None]:
        """Yield slabs as they are sealed, from `first_block` of the block table on; the last event is `closed`.

        May be called before the handle is reserved. A reader that `acknowledges` may be sent the blocks in windows, and
        calls `acknowledge` for each slab that `is_window`. Renews the reader's lease until `release`.
        Raises what ended the handle, KvCorrupt if a block was left out, Unavailable when the service goes away,
        DeadlineExceeded at the handle's deadline.
        """
        request = kv.WatchRequest(
            handle=handle,
            reader_id=reader_id,
            reader_incarnation=self.incarnation,
            layout=layout,
            first_block=first_block,
            time_left_ms=milliseconds(seconds_left),
            acknowledges=acknowledges,
        )
        self._leases.hold(handle, reader_id, seconds_left)
        seconds = max(0.0, self._leases.seconds_left(handle, reader_id)) + self._call_seconds
        slabs: list[kv.Slab] = []
        async with aclosing(messages_of(self._stub.Watch(request, timeout=seconds))) as events:
            async for event in events:
                if event.WhichOneof("kind") == "error":
                    self._leases.let_go(handle, reader_id)
                    raise errors.from_proto(event.error)
                if event.WhichOneof("kind") == "closed":
                    _check_complete(handle, slabs, layout, first_block, event.closed.num_blocks)
                    yield event
                    return
                slabs.append(event.slab)
                yield event
        raise Unavailable(f"the KV service at {self.address} ended a watch before it was closed")

    async def acknowledge(
        self, handle: pb.KvHandle, reader_id: str, num_slabs: int, followers: Sequence[str] = ()
    ) -> None:
        """Report that a watch's leading `num_slabs` slabs were copied; raises KvNotFound without a lease on a copy.

        `followers`: readers for whom this one copies too.
        """
        request = kv.AcknowledgeRequest(handle=handle, reader_id=reader_id, num_slabs=num_slabs, followers=followers)
        await self._call(self._stub.Acknowledge, request)

    async def read(
        self,
        handle: pb.KvHandle,
        reader_id: str,
        slab: kv.Slab,
        into: memoryview | Sequence[memoryview],
        first_block: int = 0,
    ) -> int:
        """Copy a slab's blocks, from `first_block` of the block table on, and return the number of bytes.

        `into` is one buffer, filled without gaps, or one per block. Raises KvCorrupt if a checksum does not match.
        """
        num_dropped = max(0, first_block - slab.first_block)
        sizes = [extent.num_bytes for extent in slab.extents][num_dropped:]
        blocks = split_blocks(into, sizes) if isinstance(into, memoryview) else into
        await self.receive(handle, reader_id, slab, blocks, first_block)
        return sum(sizes)

    async def receive(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, blocks: Sequence[memoryview], first_block: int
    ) -> list[int]:
        """As `read`, with one buffer per block; return the blocks' checksums, which have been verified."""
        request = kv.ReadRequest(
            handle=handle, reader_id=reader_id, slab_index=slab.index, first_block=first_block, num_blocks=len(blocks)
        )
        remaining = max(self._call_seconds, self._leases.seconds_left(handle, reader_id))
        call = self._stub.Read(request, timeout=remaining)
        async with aclosing(messages_of(call)) as chunks:
            num_filled = await fill_blocks(blocks, chunks)
        if num_filled != len(blocks):
            raise KvCorrupt(f"the slab ended after {num_filled} of {len(blocks)} blocks")
        checksums = checksums_in(await call.trailing_metadata())
        _verify(handle, slab, blocks, checksums)
        return checksums

    # -------------------------------------------------------------------------------------------------- the store

    async def load(self, request: kv.LoadRequest) -> kv.LoadReply:
        """Lease the blocks of a prompt that the store has, until `unload` or the end of the lease."""
        request.lease_ms = request.lease_ms or int(self._lease_seconds * 1000)
        return await self._call(self._stub.Load, request)

    async def unload(self, reader_id: str) -> None:
        """Release all leases of this reader from `load`; harmless without any."""
        await self._call(self._stub.Unload, kv.UnloadRequest(reader_id=reader_id))

    async def publish(self, request: kv.PublishRequest) -> kv.PublishReply:
        """Publish full blocks of a lent region; returns once the service has copied the blocks that it wants."""
        return await self._call(self._stub.Publish, request)

    async def report_pool(self, reports: AsyncIterator[kv.PoolReport]) -> None:
        """Report the points of this worker's pool until the service goes away: raises Unavailable then.

        Raises Unsupported from services of releases without such reports.
        """
        async with aclosing(messages_of(self._stub.ReportPool(reports))) as replies:
            async for _ in replies:
                pass
        raise Unavailable(f"the KV service at {self.address} ended a report of a pool")

    async def block_events(
        self, questions: asyncio.Queue[pb.AskTables | None] | None = None
    ) -> AsyncGenerator[kv.BlockEventBatch, None]:
        """Yield what the host's store and the pools of its workers have: first all, then changes.

        `questions` are sent, and answered between the batches; None is the last one: gRPC waits for the next one also
        when the service has ended the stream. Raises Unavailable when the service goes away, Unsupported from services
        of releases without block events.
        """
        async with aclosing(messages_of(self._stub.BlockEvents(_event_requests(questions)))) as batches:
            async for batch in batches:
                yield batch
        raise Unavailable(f"the KV service at {self.address} ended its block events")

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        """Copy the leading blocks that another host's store has, and return their checksums, verified here.

        Stops before the first block whose checksum differs; the buffers from there on are undefined.
        """
        call = self._stub.ReadBlocks(request, timeout=self._call_seconds)
        async with aclosing(messages_of(call)) as chunks:
            num_filled = await fill_blocks(into, chunks)
        checksums = checksums_in(await call.trailing_metadata())[:num_filled]
        for index, checksum in enumerate(checksums):
            if block_checksum(into[index]) != checksum:
                log.warning("fetched_block_corrupt", source=self.address, index=index)
                return checksums[:index]
        return checksums

    # --------------------------------------------------------------------------------------------------- both

    async def renew(self, handles: Sequence[pb.KvHandle], reader_id: str = "") -> list[HandleState | None]:
        """Extend leases, a reader's or (with "") the writer's.

        AWAITED for a handle that the service does not know; None for a state that this version does not know.
        """
        reply = await self._call(self._stub.Renew, kv.RenewRequest(handles=handles, reader_id=reader_id))
        return [HandleState.of(state) for state in reply.states]

    async def release(self, handle: pb.KvHandle, reader_id: str, seconds_left: float | None = None) -> HandleState:
        """Release one reader's lease; harmless for a reader that never watches."""
        self._leases.let_go(handle, reader_id)
        request = kv.ReleaseRequest(handle=handle, reader_id=reader_id, time_left_ms=milliseconds(seconds_left))
        return HandleState((await self._call(self._stub.Release, request)).state)

    async def release_all(self, handle: pb.KvHandle, seconds_left: float | None = None) -> HandleState:
        """End the handle for all readers."""
        self._leases.forget(handle)
        request = kv.ReleaseRequest(handle=handle, all=True, time_left_ms=milliseconds(seconds_left))
        return HandleState((await self._call(self._stub.Release, request)).state)

    async def abort(self, handle: pb.KvHandle, reason: TandemError, seconds_left: float | None = None) -> HandleState:
        """End a handle that will not be filled or read; its readers receive `reason` at once."""
        self._leases.forget(handle)
        request = kv.AbortRequest(handle=handle, reason=reason.to_proto(), time_left_ms=milliseconds(seconds_left))
        return HandleState((await self._call(self._stub.Abort, request)).state)

    async def stats(self) -> pb.StatsReply:
        return await self._call(self._stub.Stats, pb.StatsRequest())

    async def open_link(self, request: kv.OpenLinkRequest) -> kv.OpenLinkReply:
        """Ask which transports another host's service offers."""
        return await self._call(self._stub.OpenLink, request)

    async def probe(self, num_bytes: int) -> None:
        """Measure a link: have `num_bytes` zeroes sent."""
        call = self._stub.Probe(kv.ProbeRequest(num_bytes=num_bytes), timeout=self._call_seconds)
        async with aclosing(messages_of(call)) as chunks:
            async for _ in chunks:
                pass

    def hold(self, handle: pb.KvHandle, reader_id: str, seconds_left: float | None = None) -> None:
        """Keep renewing a reader's lease without watching, until `release`."""
        self._leases.hold(handle, reader_id, seconds_left)

    def let_go(self, handle: pb.KvHandle, reader_id: str) -> None:
        """Stop renewing a reader's lease; the lease then expires."""
        self._leases.let_go(handle, reader_id)

    async def close(self) -> None:
        """Stop renewing and close the channel; remaining leases expire."""
        self._is_closed = True
        await self._leases.close()
        await self._channel.close()

    # ------------------------------------------------------------------------------------------------ internals

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: object) -> Reply:
        """Call until it succeeds, is refused, or `call_seconds` have passed."""
        until = time.monotonic() + self._call_seconds
        delays = chain(_RETRY_SECONDS, repeat(_RETRY_SECONDS[-1]))
        while True:
            if self._is_closed:
                raise Unavailable(f"the connection to the KV service at {self.address} was closed")
            try:
                return await method(request, timeout=max(0.01, until - time.monotonic()))
            except Unavailable:
                delay = next(delays)
                if time.monotonic() + delay >= until:
                    raise
            await asyncio.sleep(delay)

    async def _listen(self, region_id: str) -> None:
        delays = chain(_RETRY_SECONDS, repeat(_RETRY_SECONDS[-1]))
        while True:
            try:
                request = kv.OwnRequest(region_id=region_id, incarnation=self.incarnation)
                async with aclosing(messages_of(self._stub.Own(request))) as events:
                    async for event in events:
                        delays = chain(_RETRY_SECONDS, repeat(_RETRY_SECONDS[-1]))
                        if event.WhichOneof("kind") == "ended":
                            self._leases.forget_id(event.ended.handle_id)
                            self._gone.put_nowait(event.ended)
                        elif event.WhichOneof("kind") == "copied":
                            self._gone.put_nowait(event.copied)
            except StaleIncarnation as error:
                self._gone.put_nowait(error)
                return
            except TandemError as error:
                log.debug("kv_own_interrupted", region_id=region_id, reason=error.message)
            except Exception:
                if self._is_closed:  # gRPC has an error of its own for calls on a closed channel
                    return
                raise
            await asyncio.sleep(next(delays))

    def _lost(self, handle: pb.KvHandle, reader_id: str, state: HandleState) -> None:
        """Report a handle that a renewal found ended or unknown; only its writer has blocks to free."""
        if reader_id == "":
            ended = HandleState.EXPIRED if state is HandleState.AWAITED else state
            self._gone.put_nowait(
                kv.OwnerEvent.Ended(handle_id=handle.handle_id, request_id=handle.request_id, state=ended.to_proto)
            )


async def _event_requests(
    questions: asyncio.Queue[pb.AskTables | None] | None,
) -> AsyncIterator[kv.BlockEventsRequest]:
    yield kv.BlockEventsRequest()  # a service of an earlier release begins after one request, and reads no other
    while questions is not None and (question := await questions.get()) is not None:
        yield kv.BlockEventsRequest(tables=question)


def _check_complete(
    handle: pb.KvHandle, slabs: Sequence[kv.Slab], layout: pb.KvLayout, first_block: int, num_blocks: int
) -> None:
    """Refuse a slab with missing blocks: decoding over them would give wrong tokens without an error."""
    missing = first_missing_block(slabs, layout, handle.num_tokens, first_block, num_blocks)
    if missing is not None:
        raise KvCorrupt(f"request {handle.request_id}: block {missing} of {num_blocks} is in no slab that was sent")


def _verify(handle: pb.KvHandle, slab: kv.Slab, blocks: Sequence[memoryview], checksums: Sequence[int]) -> None:
    if len(checksums) != len(blocks):
        raise KvCorrupt(f"slab {slab.index} of {handle.request_id}: {len(checksums)} checksums, {len(blocks)} blocks")
    for number, (block, checksum) in enumerate(zip(blocks, checksums, strict=True)):
        if block_checksum(block) != checksum:
            raise KvCorrupt(
                f"slab {slab.index} of {handle.request_id}: block {number} does not match its checksum",
                field="checksums",
            )
