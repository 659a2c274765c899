"""The holder's end of data connections. See frames.py for the protocol.

    accepted -> request -> (thread) reply, blocks, trailer -> request -> ... -> closed by the reader, or idle too long

An idle connection needs no thread. A reply is sent by one of 32 threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial

from google.protobuf.message import DecodeError

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.link_tls import LinkTls, OpenedLink, accept_wire
from kv_transfer_svc.transport.pieces import run_interruptible
from kv_transfer_svc.transport.source import Source
from kv_transfer_svc.transport.wires import Wire, prepare
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.server import is_loopback, split_address
from tandem_runtime.tasks import TaskSet, supervised

log = get_logger(__name__)

OpenSource = Callable[[kv.DataRequest], AbstractAsyncContextManager[Source]]

_NUM_THREADS = 32
"""As many as eight readers have connections; each is made when it is needed."""
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
        tls: LinkTls | None = None,
    ) -> None:
        """Without `tls` connections are in plain text, and beyond loopback only with `insecure`."""
        self._listen = listen
        self._verify = verify
        self._open_source = open_source
        self._insecure = insecure
        self._tls = tls
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-send")
        self._accepting: asyncio.Task[None] | None = None
        self._connections = TaskSet()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> str:
        """Listen and return the real host:port. Raises InvalidRequest beyond loopback and for a port in use."""
        host, port = split_address(self._listen)
        if self._tls is None and not self._insecure and not await is_loopback(host):
            raise InvalidRequest(
                f"--data-listen {self._listen} is beyond loopback and data connections are not encrypted; "
                "listen on 127.0.0.1, or give --insecure-plaintext if the network is trusted"
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
        wire: Wire | None = None
        opened: OpenedLink | None = None
        try:
            wire = await self._secured(sock)
            if self._tls is not None and wire.identity is not None:
                opened = self._tls.peers.accepted(wire.identity, partial(_break_off, wire))
            await self._serve_wire(wire)
        except (OSError, TandemError) as error:  # the reader is gone or a stranger; our readers retry or use gRPC
            log.info("data_connection_ended", peer=peer, reason=str(error) or "it was too slow")
        finally:
            if opened is not None:
                opened.end()
            if wire is not None:
                wire.close()
            sock.close()

    async def _secured(self, sock: socket.socket) -> Wire:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        prepare(sock, _STALL_SECONDS)
        async with asyncio.timeout(_FIRST_REQUEST_SECONDS):
            return await accept_wire(sock, self._tls, _STALL_SECONDS)

    async def _serve_wire(self, wire: Wire) -> None:
        idle_seconds = _FIRST_REQUEST_SECONDS
        while (request := await _next_request(wire, idle_seconds)) is not None:
            await self._answer(wire, request)
            idle_seconds = _IDLE_SECONDS

    async def _answer(self, wire: Wire, request: kv.DataRequest) -> None:
        try:
            self._verify(request)
            async with self._open_source(request) as source:
                await run_interruptible(self._threads, partial(_send, wire, source), wire.interrupt)
        except TandemError as error:
            await _refuse(wire, error)
        except OSError:
            raise
        except Exception as error:
            log.exception("data_request_failed")
            failure = InternalError(f"a data request failed: {error!r}")
            await _refuse(wire, failure)
            raise failure from error


def _break_off(wire: Wire, reason: TandemError) -> None:
    """Close the connection of a peer that is revoked or has expired; who reads from it or writes to it, ends."""
    wire.interrupt()


async def _next_request(wire: Wire, idle_seconds: float) -> kv.DataRequest | None:
    """Return the next request; None if the reader closed the connection or sent nothing for `idle_seconds`."""
    try:
        async with asyncio.timeout(idle_seconds):
            header = await _exactly(wire, frames.HEADER_BYTES)
        if not header:
            return None
        async with asyncio.timeout(_STALL_SECONDS):
            content = await _exactly(wire, frames.message_bytes(header))
    except TimeoutError:
        return None
    try:
        return kv.DataRequest.FromString(content)
    except DecodeError as error:
        raise InvalidRequest(f"a data connection sent an invalid DataRequest: {error}") from error


async def _exactly(wire: Wire, num_bytes: int) -> bytes:
    """Return `num_bytes` bytes, or b"" if the reader disconnected before the first byte."""
    content = bytearray()
    while len(content) < num_bytes:
        more = await wire.receive_some(num_bytes - len(content))
        if not more and content:
            raise ConnectionResetError(f"the reader disconnected after {len(content)} of {num_bytes} bytes")
        if not more:
            return b""
        content += more
    return bytes(content)


def _send(wire: Wire, source: Source) -> None:
    """Send one reply, in a thread. Generations are compared after the last byte was sent."""
    wire.set_blocking(True)
    wire.send(frames.packed(kv.DataReply(num_bytes=source.num_bytes)), more=source.num_bytes > 0)
    for group in source:
        wire.send_group(group)
    trailer = kv.DataTrailer()
    try:
        trailer.checksums.extend(source.finish())
    except TandemError as error:
        trailer.error.CopyFrom(error.to_proto())
    wire.send(frames.packed(trailer))
    wire.set_blocking(False)


async def _refuse(wire: Wire, error: TandemError) -> None:
    await wire.send_all(frames.packed(kv.DataReply(error=error.to_proto())))
