"""The holder's end of data connections. See frames.py for the protocol.

    accepted -> request -> (thread) reply, blocks, trailer -> request -> ... -> closed by the reader, or idle too long

An idle connection needs no thread. A reply is sent by one of 8 threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.pieces import rest_of, run_interruptible
from kv_transfer_svc.transport.source import Source
from kv_transfer_svc.transport.tcp_transport import set_timeouts
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.server import is_loopback, split_address
from tandem_runtime.tasks import TaskSet, supervised

log = get_logger(__name__)

OpenSource = Callable[[kv.DataRequest], AbstractAsyncContextManager[Source]]

_NUM_THREADS = 8
_MAX_CONNECTIONS = 256
_FIRST_REQUEST_SECONDS = 5.0
_IDLE_SECONDS = 120.0
_STALL_SECONDS = 10.0


class DataServer:
    """Listens beside the gRPC server. `verify` raises for strangers; `open_source` yields the bytes of a reply."""

    def __init__(
        self,
        listen: str,
        verify: Callable[[kv.DataRequest], None],
        open_source: OpenSource,
        *,
        insecure: bool = False,
    ) -> None:
        self._listen = listen
        self._verify = verify
        self._open_source = open_source
        self._insecure = insecure
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-send")
        self._accepting: asyncio.Task[None] | None = None
        self._connections = TaskSet()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> str:
        """Listen and return the real host:port. Raises InvalidRequest beyond loopback and for a port in use."""
        host, port = split_address(self._listen)
        if not self._insecure and not await is_loopback(host):
            raise InvalidRequest(
                f"--data-listen {self._listen} is beyond loopback and data connections are not encrypted; "
                "listen on 127.0.0.1, or give --insecure if the network is trusted"
            )
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            self._listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=64)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on --data-listen {self._listen}: {error}; is the port in use? port 0 takes a free one"
            ) from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(supervised("data-connections", self._accept), name="data-connections")
        return f"{host}:{self._listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening and close every connection, also in the middle of a block."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._listener.close()
        await self._connections.cancel()
        self._threads.shutdown(wait=False)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors: readers fall back to gRPC
                log.warning("data_connection_not_accepted", error=str(error))
                await asyncio.sleep(1.0)
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning("data_connection_refused", peer=str(peer), num_connections=len(self._connections))
                sock.close()
                continue
            self._connections.spawn(self._serve(sock, str(peer)))

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            _prepare(sock)
            idle_seconds = _FIRST_REQUEST_SECONDS
            while (request := await _next_request(sock, idle_seconds)) is not None:
                await self._answer(sock, request)
                idle_seconds = _IDLE_SECONDS
        except (OSError, TandemError) as error:  # the reader is gone or a stranger; our readers retry or use gRPC
            log.info("data_connection_ended", peer=peer, reason=str(error))
        finally:
            sock.close()

    async def _answer(self, sock: socket.socket, request: kv.DataRequest) -> None:
        try:
            self._verify(request)
            async with self._open_source(request) as source:
                await run_interruptible(self._threads, partial(_send, sock, source), partial(_wake, sock))
        except TandemError as error:
            await _refuse(sock, error)
        except OSError:
            raise
        except Exception as error:
            log.exception("data_request_failed")
            failure = InternalError(f"a data request failed: {error!r}")
            await _refuse(sock, failure)
            raise failure from error


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_timeouts(sock, _STALL_SECONDS)


async def _next_request(sock: socket.socket, idle_seconds: float) -> kv.DataRequest | None:
    """Return the next request; None if the reader closed the connection or sent nothing for `idle_seconds`."""
    try:
        async with asyncio.timeout(idle_seconds):
            header = await _exactly(sock, frames.HEADER_BYTES)
        if not header:
            return None
        async with asyncio.timeout(_STALL_SECONDS):
            content = await _exactly(sock, frames.message_bytes(header))
    except TimeoutError:
        return None
    try:
        return kv.DataRequest.FromString(content)
    except DecodeError as error:
        raise InvalidRequest(f"a data connection sent an invalid DataRequest: {error}") from error


async def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Return `num_bytes` bytes, or b"" if the reader disconnected before the first byte."""
    content = bytearray()
    while len(content) < num_bytes:
        more = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(content))
        if not more and content:
            raise ConnectionResetError(f"the reader disconnected after {len(content)} of {num_bytes} bytes")
        if not more:
            return b""
        content += more
    return bytes(content)


def _send(sock: socket.socket, source: Source) -> None:
    """Send one reply, in a thread. Generations are compared after the last byte was sent."""
    sock.setblocking(True)  # the kernel then waits, within the timeouts, and takes a whole group
    sock.sendall(frames.packed(kv.DataReply(num_bytes=source.num_bytes)), socket.MSG_MORE if source.num_bytes else 0)
    for group in source:
        _send_group(sock, group)
    trailer = kv.DataTrailer()
    try:
        trailer.checksums.extend(source.finish())
    except TandemError as error:
        trailer.error.CopyFrom(error.to_proto())
    sock.sendall(frames.packed(trailer))
    sock.setblocking(False)


def _send_group(sock: socket.socket, group: list[memoryview]) -> None:
    while group:
        num_bytes = sock.sendmsg(group)
        group = rest_of(group, num_bytes)


async def _refuse(sock: socket.socket, error: TandemError) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, frames.packed(kv.DataReply(error=error.to_proto())))


def _wake(sock: Any) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("data_connection_was_closed", reason=str(error))
