"""Feeds sequences of calls to a KV service in this process, without gRPC.

    | method: 1 byte | flags: 1 byte | length: 2 bytes, little-endian | request | ...

With the lowest flag, handles are signed as the control plane signs them, so that what stands behind the signature is
reached. Such a handle is held by this service: no call leaves the process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError, Message

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.service import KvTransferService
from kv_transfer_svc.store import HandleStore
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import tables_pb2 as tables
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError, Unauthenticated
from tandem_runtime.kv.regions import RegionOffer
from tandem_runtime.kv.shared_region import SharedRegion
from tests.kv_transfer_svc.layout import BLOCK_BYTES, BLOCK_TOKENS, KEYS, SIGNER, a_layout

_NUM_SLOTS = 4
_MAX_CALLS = 6
_MAX_EVENTS = 4
_TURNS = 20
_LOOPS: list[asyncio.AbstractEventLoop] = []
_METHODS: Sequence[tuple[str, type[Message]]] = (
    ("Reserve", kv.ReserveRequest),
    ("Seal", kv.SealRequest),
    ("Watch", kv.WatchRequest),
    ("Renew", kv.RenewRequest),
    ("Release", kv.ReleaseRequest),
    ("Abort", kv.AbortRequest),
    ("Read", kv.ReadRequest),
    ("Publish", kv.PublishRequest),
    ("Load", kv.LoadRequest),
    ("Unload", kv.UnloadRequest),
    ("ReadBlocks", kv.ReadBlocksRequest),
    ("Own", kv.OwnRequest),
    ("OpenLink", kv.OpenLinkRequest),
    ("BlockEvents", kv.BlockEventsRequest),
    ("ReportPool", kv.PoolReport),
    ("Tables", tables.TablesRequest),
)


def feed_kv_calls(data: bytes) -> None:
    """Make the calls that `data` describes: each is answered, or refused with a typed error."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    _LOOPS[0].run_until_complete(_feed(data))


async def _feed(data: bytes) -> None:
    store = HandleStore(clock=lambda: 1_000_000.0)
    arena = Arena("arena", 16 * 4096)
    cache = HostCache(BlockAllocator(8 * BLOCK_BYTES), None, store.regions, "store", store.clock)
    service = KvTransferService(store, arena, "holder-1", lambda: KEYS, pb.StatsReply, cache)
    service.set_address("10.0.0.2:8650")
    _lend(store)
    try:
        for name, request in _calls(data):
            try:
                await _call(service, name, request)
            except TandemError:
                continue
        service.sweep()
    finally:
        await service.puller.close()
        store.regions.close()
        await cache.close()
        arena.close()


def _lend(store: HandleStore) -> None:
    region = SharedRegion.create("fuzz", _NUM_SLOTS * BLOCK_BYTES, _NUM_SLOTS)
    offer = RegionOffer("region-1", "prefill-1", region.total_bytes, _NUM_SLOTS, BLOCK_BYTES, region.generations_offset)
    store.regions.take(offer, os.dup(region.fd), connection=None)
    region.close()


def _calls(data: bytes) -> Iterator[tuple[str, Any]]:
    for _ in range(_MAX_CALLS):
        if len(data) < 4:
            return
        name, kind = _METHODS[data[0] % len(_METHODS)]
        flags, length = data[1], int.from_bytes(data[2:4], "little")
        content, data = data[4 : 4 + length], data[4 + length :]
        try:
            request: Any = kind.FromString(content)
        except DecodeError:
            continue
        if flags & 1:
            _sign(request)
        yield name, request


def _sign(request: Any) -> None:
    handles = list(getattr(request, "handles", ()))
    if "handle" in request.DESCRIPTOR.fields_by_name:
        handles.append(request.handle)
    for handle in handles:
        handle.holder_address = ""
        with suppress(Unauthenticated):  # more bytes than a handle may have
            handle.CopyFrom(SIGNER.sign(handle))


async def _call(service: KvTransferService, name: str, request: Any) -> None:
    answer = getattr(service, name)(_stream(request) if name in ("ReportPool", "BlockEvents") else request, _Context())
    if isinstance(answer, AsyncIterator):
        await _read_some(answer)
    else:
        await answer


async def _stream(request: Any) -> AsyncIterator[Any]:
    yield request
    yield request


async def _read_some(stream: Any) -> None:
    """Take the events that are there; a stream that waits for others is closed."""
    try:
        for _ in range(_MAX_EVENTS):
            event = asyncio.ensure_future(anext(stream, None))
            for _ in range(_TURNS):
                if event.done():
                    break
                await asyncio.sleep(0)
            if not event.done():
                event.cancel()
                await asyncio.gather(event, return_exceptions=True)
                return
            if event.result() is None:
                return
    finally:
        await stream.aclose()


class _Context:
    def set_trailing_metadata(self, metadata: Any) -> None:
        """Taken and forgotten."""


def kv_call_seeds() -> Sequence[bytes]:
    handle = pb.KvHandle(
        handle_id=b"0123456789abcdef",
        request_id="request-1",
        prefill_incarnation="prefill-1",
        num_tokens=2 * BLOCK_TOKENS,
        num_readers=1,
        deadline_unix_ms=2_000_000_000,
    )
    extents = [
        pb.Extent(
            kind=pb.MEMORY_KIND_HOST,
            region_id="region-1",
            offset=slot * BLOCK_BYTES,
            num_bytes=BLOCK_BYTES,
            slot=slot,
        )
        for slot in range(2)
    ]
    slab = kv.Slab(num_blocks=2, num_layers=2, extents=extents)
    reserve = kv.ReserveRequest(handle=handle, region_id="region-1", layout=a_layout(), lease_ms=5000)
    seal = kv.SealRequest(
        handle=handle, slabs=[slab], close=True, num_blocks=2, first_tokens=[kv.FirstToken(token_id=7)]
    )
    watch = kv.WatchRequest(handle=handle, reader_id="reader", reader_incarnation="decode-1", layout=a_layout())
    read = kv.ReadRequest(handle=handle, reader_id="reader")
    release = kv.ReleaseRequest(handle=handle, reader_id="reader")
    odd_layout = a_layout(kind=99)
    part = kv.Slab(num_blocks=1, num_layers=1, extents=[pb.Extent(**_part(extents[0]))])
    endless = kv.SealRequest(handle=handle, slabs=[part], close=True, num_blocks=2**32 - 1)
    digest = bytes(16)
    block = kv.StoredBlock(block_hash=b"h" * 16, extent=extents[0])
    publish = kv.PublishRequest(incarnation="prefill-1", layout_digest=digest, blocks=[block], account_tag=b"a")
    load = kv.LoadRequest(
        layout_digest=digest, block_hashes=[b"h" * 16], reader_id="reader", lease_ms=1000, bytes_per_block=BLOCK_BYTES
    )
    return [
        _sequence(reserve, seal, watch, read, release),
        _sequence(watch, reserve, kv.AbortRequest(handle=handle), kv.RenewRequest(handles=[handle])),
        _sequence(kv.ReserveRequest(handle=handle, region_id="region-1", layout=odd_layout, lease_ms=5000)),
        _sequence(reserve, endless),
        _sequence(publish, load, kv.UnloadRequest(reader_id="reader"), kv.OwnRequest(region_id="region-1")),
        _sequence(tables.TablesRequest(max_rows=3), kv.OpenLinkRequest(incarnation="a", holder_address="b")),
    ]


def _part(extent: pb.Extent) -> dict[str, Any]:
    return {"kind": extent.kind, "region_id": extent.region_id, "num_bytes": BLOCK_BYTES // 2}


def _sequence(*requests: Message) -> bytes:
    kinds: list[Callable[..., Message]] = [kind for _, kind in _METHODS]
    parts = []
    for request in requests:
        content = request.SerializeToString()
        parts.append(bytes([kinds.index(type(request)), 1]) + len(content).to_bytes(2, "little") + content)
    return b"".join(parts)
