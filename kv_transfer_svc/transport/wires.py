"""The bytes of one data connection, in plain text or over TLS 1.3.

A wire is used from one place at a time:

    on the event loop   receive_some, send_all: an idle connection needs no thread
    in a thread         exactly, fill, send, send_group: between `set_blocking(True)` and `set_blocking(False)`

Both read into the caller's memory and send from it. Over TLS, OpenSSL decrypts each record of 16 KiB straight into the
caller's memory, without the interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Protocol

from kv_transfer_svc.transport.pieces import rest_of
from tandem_runtime.certificates.names import Identity

_RECORD_BYTES = 16 << 10
"""The most plain text in one TLS record (RFC 8446, section 5.1)."""


class Wire(Protocol):
    """One connection. Raises OSError once it has failed or the peer has left."""

    @property
    def identity(self) -> Identity | None:
        """Who is at the other end, by its certificate; None in plain text."""

    def set_blocking(self, blocking: bool) -> None:
        """Prepare for use in a thread, or on the event loop."""

    def interrupt(self) -> None:
        """End the connection for both sides; wakes the thread that waits for it. May be called from anywhere."""

    def close(self) -> None:
        """Free the descriptor; nobody uses the wire any more."""

    async def receive_some(self, num_bytes: int) -> bytes:
        """Return 1 to `num_bytes` bytes, or b"" if the peer has left."""

    async def send_all(self, content: bytes) -> None: ...

    def exactly(self, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes, fewer if the peer leaves before."""

    def fill(self, group: Sequence[memoryview]) -> None:
        """Receive into all of `group`; raises ConnectionError if the peer leaves before."""

    def send(self, content: bytes, *, more: bool = False) -> None:
        """Send; `more` says that other bytes follow at once."""

    def send_group(self, group: Sequence[memoryview]) -> None: ...


class PlainWire:
    """A connection without encryption. The kernel waits, within its timeouts, and moves a whole group per call."""

    identity = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def set_blocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the peer disconnected first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    async def receive_some(self, num_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, num_bytes)

    async def send_all(self, content: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, content)

    def exactly(self, num_bytes: int) -> bytes:
        return self._sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""

    def fill(self, group: Sequence[memoryview]) -> None:
        while group:
            num_bytes = self._sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
            if num_bytes == 0:
                raise _left_early()
            group = rest_of(group, num_bytes)

    def send(self, content: bytes, *, more: bool = False) -> None:
        self._sock.sendall(content, socket.MSG_MORE if more else 0)

    def send_group(self, group: Sequence[memoryview]) -> None:
        while group:
            num_bytes = self._sock.sendmsg(group)
            group = rest_of(group, num_bytes)


class TlsWire:
    """A connection over TLS, after its handshake."""

    def __init__(self, sock: ssl.SSLSocket, identity: Identity, stall_seconds: float) -> None:
        self.identity = identity
        self._sock = sock
        self._stall_seconds = stall_seconds

    def set_blocking(self, blocking: bool) -> None:
        # Python's own timeout: OpenSSL repeats a call that the kernel's timeout has ended.
        self._sock.settimeout(self._stall_seconds if blocking else 0.0)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            # Not SSLSocket's: it makes a plain socket of it, which another thread would go on to read.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    async def receive_some(self, num_bytes: int) -> bytes:
        while True:
            try:
                return self._sock.recv(num_bytes)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                await until_ready(self._sock, error)

    async def send_all(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                await until_ready(self._sock, error)

    def exactly(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest:
            received = self._sock.recv_into(rest)
            if received == 0:
                return bytes(content[: num_bytes - len(rest)])
            rest = rest[received:]
        return bytes(content)

    def fill(self, group: Sequence[memoryview]) -> None:
        for piece in group:
            rest = piece
            while rest:
                received = self._sock.recv_into(rest)
                if received == 0:
                    raise _left_early()
                rest = rest[received:]

    def send(self, content: bytes, *, more: bool = False) -> None:
        self._sock.sendall(content)

    def send_group(self, group: Sequence[memoryview]) -> None:
        if len(group) > 1 and sum(map(len, group)) < len(group) * _RECORD_BYTES:
            self._sock.sendall(b"".join(group))  # small blocks: whole records cost less than the copy
            return
        for piece in group:
            self._sock.sendall(piece)


def prepare(sock: socket.socket, stall_seconds: float) -> None:
    """Set what every data connection has: no delay, and how long one system call may wait for the peer.

    The timeouts are the kernel's: Python's own poll before every call, and send in parts.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    whole, rest = divmod(stall_seconds, 1)
    timeval = struct.pack("@ll", int(whole), int(rest * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


async def until_ready(sock: socket.socket, wanted: BaseException | None = None) -> None:
    """Wait until `sock` can be read, or written if `wanted` is SSLWantWriteError."""
    loop, fileno = asyncio.get_running_loop(), sock.fileno()
    ready = loop.create_future()
    is_writing = isinstance(wanted, ssl.SSLWantWriteError)
    add = loop.add_writer if is_writing else loop.add_reader
    remove = loop.remove_writer if is_writing else loop.remove_reader

    def on_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fileno, on_ready)
    try:
        await ready
    finally:
        remove(fileno)


def _left_early() -> ConnectionResetError:
    return ConnectionResetError("the peer disconnected in the middle of a block")
