"""Exchanges small messages with file descriptors between two processes of one host.

Unix SOCK_SEQPACKET: one packet is one JSON object with at most two descriptors (SCM_RIGHTS, unix(7)).
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from tandem_runtime.errors import InvalidRequest, Unauthenticated, Unavailable
from tandem_runtime.peer_credentials import check_own_user

MAX_PACKET_BYTES = 16 * 1024
_MAX_FDS = 2
"""Of a region in device memory. The kernel closes what more a peer sends."""


class PacketSocket:
    """One end of a connection, on the event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    @classmethod
    async def connect(cls, path: str) -> PacketSocket:
        """Connect to the listener at `path`; raises Unavailable if nobody of this user or root listens there."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # this process has as many files open as it may
            raise Unavailable(f"no socket for the KV service at {path}: {error.strerror}") from error
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
        except OSError as error:
            sock.close()
            raise Unavailable(f"no KV service answers at {path}: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise
        try:
            check_own_user(sock, path)
        except Unauthenticated as error:
            sock.close()
            raise Unavailable(f"no KV service of ours answers at {path}: {error.message}") from error
        return cls(sock)

    async def send(self, message: dict[str, Any], *fds: int) -> None:
        """Send one message; the descriptors stay the caller's. Raises Unavailable if the other end is closed."""
        packet = json.dumps(message).encode()
        assert len(packet) <= MAX_PACKET_BYTES, "region messages are a few hundred bytes"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        await self._when_ready(_WRITABLE, lambda: self._sock.sendmsg([packet], rights))

    async def receive(self) -> tuple[dict[str, Any], tuple[int, ...]] | None:
        """Return the next message and its descriptors, the caller's from now on; None if the other end is closed."""
        try:
            packet, fds, _, _ = await self._when_ready(
                _READABLE, lambda: socket.recv_fds(self._sock, MAX_PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            )
        except Unavailable:
            return None
        if not packet:
            close_all(fds)
            return None
        try:
            message = json.loads(packet)
        except (ValueError, RecursionError):  # the latter for JSON nested some thousand deep
            message = None
        if not isinstance(message, dict):
            close_all(fds)
            raise InvalidRequest("a packet on the region socket is not a JSON object")
        return message, tuple(fds)

    def close(self) -> None:
        self._sock.close()

    async def _when_ready(self, direction: str, attempt: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return attempt()
            except BlockingIOError:
                await _ready(loop, self._sock, direction)
            except OSError as error:
                raise Unavailable(f"the region socket is closed: {error.strerror}") from error


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody needs."""
    for fd in fds:
        os.close(fd)


_READABLE = "readable"
_WRITABLE = "writable"


async def _ready(loop: asyncio.AbstractEventLoop, sock: socket.socket, direction: str) -> None:
    """Wait until `sock` can be read or written."""
    fileno = sock.fileno()
    ready = loop.create_future()
    add = loop.add_reader if direction is _READABLE else loop.add_writer
    remove = loop.remove_reader if direction is _READABLE else loop.remove_writer

    def on_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fileno, on_ready)
    try:
        await ready
    finally:
        remove(fileno)
