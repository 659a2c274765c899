"""How does the holder's end of data connections work? See frames.py for what travels.

    accepted -> request -> (thread) reply, blocks, trailer -> request -> ... -> closed by the reader, or silent too long

Waiting for a request costs no thread; sending one takes one of a few, for as long as it takes.
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
from kv_transfer_svc.transport.connection import rest_of, set_timeouts
from kv_transfer_svc.transport.source import Source
from kv_transfer_svc.transport.threads import finished
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.server import is_loopback, split_address

log = get_logger(__name__)

OpenSource = Callable[[kv.DataRequest], AbstractAsyncContextManager[Source]]

_NUM_THREADS = 8
_MAX_CONNECTIONS = 256
_FIRST_REQUEST_SECONDS = 5.0
_IDLE_SECONDS = 120.0
_STALL_SECONDS = 10.0


class DataServer:
    """Listens beside the gRPC server. `verify` raises for strangers; `open_source` says what a request is sent."""

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
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> str:
        """Listen and return the real host:port. Raises InvalidRequest beyond loopback and where the port is taken."""
        host, port = split_address(self._listen)
        if not self._insecure and not await is_loopback(host):
            raise InvalidRequest(
                f"--data-listen {self._listen} is beyond loopback and data connections are not encrypted; "
                "listen on 127.0.0.1, or say --insecure if the network is trusted"
            )
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            self._listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=64)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on --data-listen {self._listen}: {error}; is the port taken? port 0 takes a free one"
            ) from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="data-connections")
        return f"{host}:{self._listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening and hang up on everyone, also in the middle of a block."""
        tasks = list(self._connections)
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._accepting is not None:
            self._listener.close()
        self._threads.shutdown(wait=False)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors: those who ask go on over gRPC
                log.warning("data_connection_not_accepted", error=str(error))
                await asyncio.sleep(1.0)
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning("data_connection_refused", peer=str(peer), num_connections=len(self._connections))
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock, str(peer)))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            _prepare(sock)
            patience = _FIRST_REQUEST_SECONDS
            while (request := await _next_request(sock, patience)) is not None:
                await self._answer(sock, request)
                patience = _IDLE_SECONDS
        except (OSError, TandemError) as error:  # the reader is gone, or no reader of ours; it asks again or over gRPC
            log.info("data_connection_ended", peer=peer, reason=str(error))
        finally:
            sock.close()

    async def _answer(self, sock: socket.socket, request: kv.DataRequest) -> None:
        try:
            self._verify(request)
            async with self._open_source(request) as source:
                await finished(self._threads, partial(_send, sock, source), partial(_wake, sock))
        except TandemError as error:
            await _refuse(sock, error)
        except OSError:
            raise
        except Exception as error:
            log.exception("data_request_broke")
            await _refuse(sock, InternalError(f"a data request broke: {error!r}"))
            raise


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_timeouts(sock, _STALL_SECONDS)


async def _next_request(sock: socket.socket, patience: float) -> kv.DataRequest | None:
    """Return the next request; None if the reader is done, or said nothing for so many seconds."""
    try:
        async with asyncio.timeout(patience):
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
        raise InvalidRequest(f"what came on a data connection is no DataRequest: {error}") from error


async def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes, or b"" if the reader hung up before the first."""
    content = bytearray()
    while len(content) < num_bytes:
        more = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(content))
        if not more and content:
            raise ConnectionResetError(f"the reader hung up after {len(content)} of {num_bytes} bytes")
        if not more:
            return b""
        content += more
    return bytes(content)


def _send(sock: socket.socket, source: Source) -> None:
    """Send one answer, in a thread. The generations are looked at when the last byte has left."""
    sock.setblocking(True)  # the kernel then waits, with the timeouts set, and takes a group whole
    sock.sendall(frames.packed(kv.DataReply(num_bytes=source.num_bytes)), socket.MSG_MORE if source.num_bytes else 0)
    for group in source:
        _send_group(sock, group)
    trailer = kv.DataTrailer()
    try:
        trailer.checksums.extend(source.verdict())
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
