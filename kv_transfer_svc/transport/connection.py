"""How does the reader's end of a data connection work? Blocking, in a thread of its own; see frames.py."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.pieces import RunningChecksums, groups, leading
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime import errors
from tandem_runtime.errors import InvalidRequest, KvCorrupt
from tandem_runtime.server import split_address

CONNECT_SECONDS = 1.0
STALL_SECONDS = 5.0
"""How long one system call may wait for the peer; one moves at most 1 MiB."""

M = TypeVar("M", bound=Message)


class NoReply(LinkBroken):
    """The peer hung up before it answered: it had closed an idle connection."""


class DataConnection:
    """One connection; asks one thing at a time."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.is_usable = True
        """Whether another request may follow."""
        self._sock = sock
        self._peer = peer

    @classmethod
    async def connect(cls, address: str) -> DataConnection:
        """Raises LinkBroken if nobody takes the connection within a second."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return cls(await _connected(address), address)
        except TimeoutError as error:
            raise LinkBroken(f"{address} took no connection within {CONNECT_SECONDS:g} s") from error
        except (OSError, InvalidRequest) as error:
            raise LinkBroken(f"{address} took no connection: {error}") from error

    def exchange(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        """Ask, fill the leading buffers with what comes, return their checksums, verified. Called in a thread.

        Raises what the peer refuses; LinkBroken; KvCorrupt of field "checksums".
        """
        self.is_usable = False
        try:
            return self._exchange(request, into)
        except OSError as error:
            raise LinkBroken(f"the data connection to {self._peer} broke: {error}") from error

    def break_off(self) -> None:
        """Wake the thread that is in `exchange`: it ends with LinkBroken."""
        with contextlib.suppress(OSError):  # the peer was quicker
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _exchange(self, request: kv.DataRequest, into: Sequence[memoryview]) -> list[int]:
        self._ask(request)
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

    def _ask(self, request: kv.DataRequest) -> None:
        try:
            self._sock.sendall(frames.packed(request))
            if not self._sock.recv(1, socket.MSG_PEEK):
                raise NoReply(f"{self._peer} had hung up")
        except ConnectionError as error:
            raise NoReply(f"{self._peer} had hung up: {error}") from error

    def _fill(self, group: list[memoryview]) -> None:
        """Receive one group whole, straight into its memory."""
        while group:
            num_bytes = self._sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
            if num_bytes == 0:
                raise LinkBroken(f"{self._peer} hung up in the middle of a block")
            group = rest_of(group, num_bytes)

    def _receive(self, kind: type[M]) -> M:
        try:
            message = kind()
            message.ParseFromString(self._exactly(frames.message_bytes(self._exactly(frames.HEADER_BYTES))))
        except (DecodeError, InvalidRequest) as error:
            raise LinkBroken(f"{self._peer} sent what is no {kind.__name__}: {error}") from error
        return message

    def _exactly(self, num_bytes: int) -> bytes:
        content = self._sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if len(content) < num_bytes:
            raise LinkBroken(f"{self._peer} hung up after {len(content)} of {num_bytes} bytes")
        return content


def rest_of(group: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of a group of which so many bytes have moved."""
    rest: list[memoryview] = []
    for piece in group:
        if num_bytes < len(piece):
            rest.append(piece[num_bytes:])
        num_bytes = max(0, num_bytes - len(piece))
    return rest


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end calls that wait too long: Python's own timeouts poll before every call, and send in parts."""
    whole, rest = divmod(seconds, 1)
    timeval = struct.pack("@ll", int(whole), int(rest * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


async def _connected(address: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = found[0]
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
