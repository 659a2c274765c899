"""How are blocks read over raw TCP? Few connections to each peer, each used by one read at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from kv_transfer_svc.transport.connection import DataConnection, NoReply
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.threads import finished
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import StaleIncarnation, TandemError, Unauthenticated

MAX_CONNECTIONS = 4


class TcpTransport:
    """Reads from one peer. A token is asked for over gRPC (`open_link`), and again when it is refused or old."""

    name = "tcp"

    def __init__(self, open_link: Callable[[], Awaitable[kv.OpenLinkReply]], threads: Executor) -> None:
        self._open_link = open_link
        self._threads = threads
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[DataConnection] = []
        self._link: kv.OpenLinkReply | None = None
        self._renew_at = 0.0
        self._is_closed = False

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        wanted = kv.ReadRequest(handle=handle, reader_id=reader_id, slab_index=slab.index, first_block=first_block)
        checksums = await self._ask(kv.DataRequest(slab=wanted), into)
        if len(checksums) != len(into):
            raise LinkBroken(f"slab {slab.index} came with {len(checksums)} blocks, it has {len(into)}")
        return checksums

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        return await self._ask(kv.DataRequest(blocks=request), into)

    async def probe(self, num_bytes: int) -> int:
        into = [memoryview(bytearray(num_bytes))] if num_bytes else []
        await self._ask(kv.DataRequest(probe=kv.ProbeRequest(num_bytes=num_bytes)), into)
        return num_bytes

    async def close(self) -> None:
        self._is_closed = True
        self._hang_up()

    async def _ask(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        """Return the checksums of the leading buffers, which are filled. The one way in for every kind of request."""
        async with self._places:
            try:
                return await self._ask_with(await self._permission(), request, into)
            except (Unauthenticated, StaleIncarnation) as error:
                if error.field != "token":
                    raise
                self._link = None
            try:
                return await self._ask_with(await self._permission(), request, into)
            except (Unauthenticated, StaleIncarnation) as error:
                if error.field != "token":
                    raise
                raise LinkBroken(f"a new token was refused: {error.message}") from error

    async def _permission(self) -> kv.OpenLinkReply:
        if self._link is None or time.monotonic() >= self._renew_at:
            try:
                link = await self._open_link()
            except TandemError as error:
                raise LinkBroken(f"no token: {error.message}") from error
            if not link.tcp_address:
                raise LinkBroken("the peer offers tcp no more")
            if self._link is None or self._link.tcp_address != link.tcp_address:
                self._hang_up()
            self._link, self._renew_at = link, time.monotonic() + 0.5 * link.token_ms / 1000
        return self._link

    async def _ask_with(self, link: kv.OpenLinkReply, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        request.incarnation, request.token = link.incarnation, link.token
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request, into)
            except NoReply:
                continue
        return await self._exchange(await DataConnection.connect(link.tcp_address), request, into)

    async def _exchange(
        self, connection: DataConnection, request: kv.DataRequest, into: Sequence[memoryview]
    ) -> list[int]:
        try:
            return await finished(
                self._threads, partial(connection.exchange, request, into), interrupt=connection.break_off
            )
        finally:
            if connection.is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.close()

    def _hang_up(self) -> None:
        while self._idle:
            self._idle.pop().close()
