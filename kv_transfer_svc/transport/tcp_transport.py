"""Reads blocks over raw TCP: the reader's end of data connections, in threads. See frames.py for the protocol.

There are few connections to each peer, and each serves one read at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.pieces import RunningChecksums, groups, leading, rest_of, run_interruptible
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import InvalidRequest, KvCorrupt, StaleIncarnation, TandemError, Unauthenticated
from tandem_runtime.server import split_address

MAX_CONNECTIONS = 4
CONNECT_SECONDS = 1.0
STALL_SECONDS = 5.0
"""How long one system call may wait for the peer; a call moves at most 1 MiB."""

M = TypeVar("M", bound=Message)


class TcpTransport:
    """Reads from one peer. Fetches a token over gRPC (`open_link`), and a new one when it is refused or old."""

    name = "tcp"

    def __init__(self, open_link: Callable[[], Awaitable[kv.OpenLinkReply]], threads: Executor) -> None:
        self._open_link = open_link
        self._threads = threads
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[DataConnection] = []
        self._link: kv.OpenLinkReply | None = None
        self._renew_at = 0.0
        self._is_closed = False

    async def read(
        self, handle: pb.KvHandle, reader_id: str, slab: kv.Slab, into: Sequence[memoryview], first_block: int
    ) -> list[int]:
        request = kv.ReadRequest(handle=handle, reader_id=reader_id, slab_index=slab.index, first_block=first_block)
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
            if self._link is None or self._link.tcp_address != link.tcp_address:
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
        return await self._exchange(await DataConnection.connect(link.tcp_address), request, into)

    async def _exchange(
        self, connection: DataConnection, request: kv.DataRequest, into: Sequence[memoryview]
    ) -> list[int]:
        try:
            return await run_interruptible(
                self._threads, partial(connection.exchange, request, into), interrupt=connection.break_off
            )
        finally:
            if connection.is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.close()

    def _disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()


class NoReply(LinkBroken):
    """The peer disconnected before it answered: it had closed an idle connection."""


class DataConnection:
    """One connection with one request at a time. `exchange` blocks."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.is_usable = True
        """Whether another request may follow."""
        self._sock = sock
        self._peer = peer

    @classmethod
    async def connect(cls, address: str) -> DataConnection:
        """Connect; raises LinkBroken if the peer does not accept the connection within 1 s."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return cls(await _connected(address), address)
        except TimeoutError as error:
            raise LinkBroken(f"{address} took no connection within {CONNECT_SECONDS:g} s") from error
        except (OSError, InvalidRequest) as error:
            raise LinkBroken(f"{address} took no connection: {error}") from error

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
        with contextlib.suppress(OSError):  # the peer disconnected first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _exchange(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        self._send(request)
        reply = self._receive(kv.DataReply)
        if reply.HasField("error"):
            self.is_usable = True
            raise errors.from_proto(reply.error)
        blocks = leading(into, reply.num_bytes)
        if blocks is None:
            raise LinkBroken(f"{self._peer} sends {reply.num_bytes} bytes, of {sum(map(len, into))} asked for")
        checksums = RunningChecksums(blocks)
        for group in groups(blocks):
            self._fill(group)
            checksums.add(group)
        trailer = self._receive(kv.DataTrailer)
        self.is_usable = True
        if trailer.HasField("error"):
            raise errors.from_proto(trailer.error)
        if list(trailer.checksums) != checksums.values:
            raise KvCorrupt(f"bytes from {self._peer} do not match their checksums", field="checksums")
        return checksums.values

    def _send(self, request: kv.DataRequest) -> None:
        try:
            self._sock.sendall(frames.packed(request))
            if not self._sock.recv(1, socket.MSG_PEEK):
                raise NoReply(f"{self._peer} had disconnected")
        except ConnectionError as error:
            raise NoReply(f"{self._peer} had disconnected: {error}") from error

    def _fill(self, group: list[memoryview]) -> None:
        """Receive one whole group, straight into its memory."""
        while group:
            num_bytes = self._sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
            if num_bytes == 0:
                raise LinkBroken(f"{self._peer} disconnected in the middle of a block")
            group = rest_of(group, num_bytes)

    def _receive(self, kind: type[M]) -> M:
        try:
            message = kind()
            message.ParseFromString(self._exactly(frames.message_bytes(self._exactly(frames.HEADER_BYTES))))
        except (DecodeError, InvalidRequest) as error:
            raise LinkBroken(f"{self._peer} sent an invalid {kind.__name__}: {error}") from error
        return message

    def _exactly(self, num_bytes: int) -> bytes:
        content = self._sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if len(content) < num_bytes:
            raise LinkBroken(f"{self._peer} disconnected after {len(content)} of {num_bytes} bytes")
        return content


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Set timeouts in the kernel: Python's own timeouts poll before every call, and send in parts."""
    whole, rest = divmod(seconds, 1)
    timeval = struct.pack("@ll", int(whole), int(rest * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


async def _connected(address: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    addresses = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_timeouts(sock, STALL_SECONDS)
    except BaseException:
        sock.close()
        raise
    return sock
