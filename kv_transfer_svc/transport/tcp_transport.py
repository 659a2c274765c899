"""Reads blocks over raw TCP: the reader's end of data connections, in threads. See frames.py for the protocol.

There are few connections to each peer, and each serves one read at a time.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.link_tls import LinkTls, OpenedLink, dial_wire
from kv_transfer_svc.transport.pieces import RunningChecksums, groups, leading, run_interruptible
from kv_transfer_svc.transport.wires import Wire, prepare
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import InvalidRequest, KvCorrupt, StaleIncarnation, TandemError, Unauthenticated
from tandem_runtime.server import split_address

MAX_CONNECTIONS = 4
CONNECT_SECONDS = 1.0
STALL_SECONDS = 5.0
"""How long one system call may wait for the peer; a call moves at most 1 MiB."""
FINISH_SECONDS = 1.0
"""How long a read that nobody wants any more may take to end. A connection that is broken off is lost, and a new one is
slow at first: over 80 ms and 1 Gbit/s its first 4 MiB take 650 ms, later ones 126 ms."""

M = TypeVar("M", bound=Message)


class TcpTransport:
    """Reads from one peer. Fetches a token over gRPC (`open_link`), and a new one when it is refused or old."""

    name = "tcp"

    def __init__(
        self, open_link: Callable[[], Awaitable[kv.OpenLinkReply]], threads: Executor, tls: LinkTls | None = None
    ) -> None:
        self._open_link = open_link
        self._tls = tls
        self._threads = threads
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[DataConnection] = []
        self._link: kv.OpenLinkReply | None = None
        self._renew_at = 0.0
        self._is_closed = False

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        request = kv.ReadRequest(
            handle=handle, reader_id=reader_id, slab_index=slab.index, first_block=first_block, num_blocks=len(into)
        )
        checksums = await self._read(kv.DataRequest(slab=request), into)
        if len(checksums) != len(into):
            raise LinkBroken(f"slab {slab.index} came with {len(checksums)} blocks, it has {len(into)}")
        return checksums

    async def read_blocks(self, request: kv.ReadBlocksRequest, into: Sequence[memoryview]) -> list[int]:
        return await self._read(kv.DataRequest(blocks=request), into)

    async def probe(self, num_bytes: int) -> int:
        into = [memoryview(bytearray(num_bytes))] if num_bytes else []
        await self._read(kv.DataRequest(probe=kv.ProbeRequest(num_bytes=num_bytes)), into)
        return num_bytes

    async def close(self) -> None:
        self._is_closed = True
        self._disconnect()

    async def _read(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        """Fill the leading buffers and return their checksums. Every kind of request passes here."""
        async with self._slots:
            try:
                return await self._read_with(await self._current_link(), request, into)
            except (Unauthenticated, StaleIncarnation) as error:
                if error.field != "token":
                    raise
                self._link = None
            try:
                return await self._read_with(await self._current_link(), request, into)
            except (Unauthenticated, StaleIncarnation) as error:
                if error.field != "token":
                    raise
                raise LinkBroken(f"a new token was refused: {error.message}") from error

    async def _current_link(self) -> kv.OpenLinkReply:
        if self._link is None or time.monotonic() >= self._renew_at:
            try:
                link = await self._open_link()
            except TandemError as error:
                raise LinkBroken(f"no token: {error.message}") from error
            if not link.tcp_address:
                raise LinkBroken("the peer no longer offers tcp")
            if self._link is None or _end_of(self._link) != _end_of(link):
                self._disconnect()
            self._link, self._renew_at = link, time.monotonic() + 0.5 * link.token_ms / 1000
        return self._link

    async def _read_with(
        self, link: kv.OpenLinkReply, request: kv.DataRequest, into: Sequence[memoryview]
    ) -> list[int]:
        request.incarnation, request.token = link.incarnation, link.token
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request, into)
            except NoReply:
                continue
        connection = await DataConnection.connect(link.tcp_address, link.identity, self._tls)
        return await self._exchange(connection, request, into)

    async def _exchange(
        self, connection: DataConnection, request: kv.DataRequest, into: Sequence[memoryview]
    ) -> list[int]:
        try:
            return await run_interruptible(
                self._threads, partial(connection.exchange, request, into), connection.break_off, FINISH_SECONDS
            )
        finally:
            if connection.is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.close()

    def _disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _end_of(link: kv.OpenLinkReply) -> tuple[str, str]:
    return link.tcp_address, link.identity


class NoReply(LinkBroken):
    """The peer disconnected before it answered: it had closed an idle connection."""


class DataConnection:
    """One connection with one request at a time. `exchange` blocks."""

    def __init__(self, wire: Wire, peer: str) -> None:
        self.is_usable = True
        """Whether another request may follow."""
        self._wire = wire
        self._peer = peer
        self._opened: OpenedLink | None = None

    @classmethod
    async def connect(cls, address: str, holder: str = "", tls: LinkTls | None = None) -> DataConnection:
        """Connect to the service of the identity `holder` ("": in plain text).

        Raises LinkBroken if the peer does not accept the connection within 1 s, or is another one.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                wire = await _connected(address, holder, tls)
        except TimeoutError as error:
            raise LinkBroken(f"{address} took no connection within {CONNECT_SECONDS:g} s") from error
        except LinkBroken:
            raise
        except (OSError, TandemError) as error:
            raise LinkBroken(f"{address} took no connection: {error}") from error
        connection = cls(wire, address)
        if tls is not None and wire.identity is not None:
            connection._opened = tls.peers.dialled(wire.identity, lambda reason: connection.break_off())
        return connection

    def exchange(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        """Send a request, fill the leading buffers, return their verified checksums. Called in a thread.

        Raises the peer's error, LinkBroken, or KvCorrupt (field "checksums").
        """
        self.is_usable = False
        try:
            return self._exchange(request, into)
        except OSError as error:
            raise LinkBroken(f"the data connection to {self._peer} failed: {error}") from error

    def break_off(self) -> None:
        """Wake the thread in `exchange`, which then raises LinkBroken."""
        self._wire.interrupt()

    def close(self) -> None:
        """Disconnect; called on the event loop."""
        if self._opened is not None:
            self._opened.end()
            self._opened = None
        self._wire.close()

    def _exchange(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        reply = self._first_reply(request)
        if reply.HasField("error"):
            self.is_usable = True
            raise errors.from_proto(reply.error)
        blocks = leading(into, reply.num_bytes)
        if blocks is None:
            raise LinkBroken(f"{self._peer} sends {reply.num_bytes} bytes, of {sum(map(len, into))} asked for")
        checksums = RunningChecksums(blocks)
        for group in groups(blocks):
            self._wire.fill(group)
            checksums.add(group)
        trailer = self._receive(kv.DataTrailer)
        self.is_usable = True
        if trailer.HasField("error"):
            raise errors.from_proto(trailer.error)
        if list(trailer.checksums) != checksums.values:
            raise KvCorrupt(f"bytes from {self._peer} do not match their checksums", field="checksums")
        return checksums.values

    def _first_reply(self, request: kv.DataRequest) -> kv.DataReply:
        try:
            self._wire.send(frames.packed(request))
            header = self._wire.exactly(frames.HEADER_BYTES)
        except ConnectionError as error:
            raise NoReply(f"{self._peer} had disconnected: {error}") from error
        if not header:
            raise NoReply(f"{self._peer} had disconnected")
        return self._receive(kv.DataReply, header)

    def _receive(self, kind: type[M], header: bytes = b"") -> M:
        header = _whole(header or self._wire.exactly(frames.HEADER_BYTES), frames.HEADER_BYTES, self._peer)
        try:
            message = kind()
            message.ParseFromString(self._exactly(frames.message_bytes(header)))
        except (DecodeError, InvalidRequest) as error:
            raise LinkBroken(f"{self._peer} sent an invalid {kind.__name__}: {error}") from error
        return message

    def _exactly(self, num_bytes: int) -> bytes:
        return _whole(self._wire.exactly(num_bytes), num_bytes, self._peer)


def _whole(content: bytes, num_bytes: int, peer: str) -> bytes:
    if len(content) < num_bytes:
        raise LinkBroken(f"{peer} disconnected after {len(content)} of {num_bytes} bytes")
    return content


async def _connected(address: str, holder: str, tls: LinkTls | None) -> Wire:
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    addresses = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
        prepare(sock, STALL_SECONDS)
        wire = await dial_wire(sock, tls, holder, STALL_SECONDS)
    except BaseException:
        sock.close()
        raise
    wire.set_blocking(True)
    return wire
