"""The HTTP server: uvicorn, with bounds on what a connection can cost before and while a request is read.

uvicorn's protocol over httptools bounds neither a head nor its time, reads bodies that nobody wants, and forgets the
running request of a connection on which more requests wait. This protocol adds:

head        bytes, lines, length of the URL and seconds: 431, 414, 408, or 400 if it is no HTTP
body        bytes per second, seconds without a byte, seconds in all (408), bytes of all bodies in flight (503)
refusals    the error in the format of the endpoint; then the rest of the input is discarded for two seconds, because
            a reset would hide the answer
pipelining  at most 16 requests wait on a connection; then it closes after the last answer

A client that closes its sending half has left: its request is cancelled, as with a closed connection.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import unquote
from uuid import uuid4

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from control_plane.api.http.bounds import MAX_HEADERS, MAX_PIPELINED, MAX_URL_BYTES
from control_plane.api.http.connections import Body, BodyHold, Connections, address_of
from control_plane.api.http.errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    UrlTooLong,
    error_answer,
    error_format_of,
)
from tandem_runtime.errors import TandemError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_ACCEPTS_PER_TURN = 64
"""asyncio accepts as many connections in one turn of the loop as its backlog has: 2,048 would take 0.1 s."""
_BACKLOG = 2_048
_SLACK_BYTES = 64 * 1024
"""Bytes of a body beyond the limit that a connection takes while the application refuses the body."""
_SMALL_BYTES = 64 * 1024
"""After an early answer, the rest of a body up to this size is read, and the connection lives on."""
_IDLE_SECONDS = 75
"""A connection without a request is closed after so long: later than clients and proxies close theirs.

httpx, so the SDKs of OpenAI and Cloudflare, uses a connection again for 5 s (undici of Node.js for 4 s, nginx and AWS's
balancers for 60 s). uvicorn's default is 5 s too: a request that was sent at that moment was answered with a reset.
"""
_FRAMING_RATIO = 4
"""Bytes of chunk framing per byte of body: a chunk needs two bytes or more on average."""


def server_config(
    app: ASGIApp, connections: Connections, *, forwarded_allow_ips: Sequence[str] = (), **options: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration for an application behind the bounds of `connections`.

    `forwarded_allow_ips`: the addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto replace
    the client's address and scheme. uvicorn's default believes everybody on this machine.
    """

    class OwnedProtocol(BoundedProtocol):
        owner = connections

    return uvicorn.Config(
        app,
        loop="asyncio",
        http=OwnedProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=bool(forwarded_allow_ips),
        forwarded_allow_ips=list(forwarded_allow_ips),
        backlog=_ACCEPTS_PER_TURN,
        timeout_keep_alive=_IDLE_SECONDS,
        **options,
    )


def listen_longer(sockets: Sequence[socket.socket]) -> None:
    """Let the kernel queue more connections than the loop accepts in one turn. Call after the server has started."""
    for each in sockets:
        each.listen(_BACKLOG)


class BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection. It reads into one buffer of all connections, so that a read is never longer than that."""

    owner: ClassVar[Connections]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.address = ""
        self._stage: Literal["between", "head", "body"] = "between"
        """between: no byte of the next request has come."""
        self._head_bytes = 0
        """Bytes of reads since the last request ended; of the head's URL and lines once it is complete."""
        self._line_bytes = 0
        self._num_lines = 0
        self._content_length: int | None = None
        self._is_chunked = False
        self._body: Body | None = None
        """The body of the latest request, until it is complete."""
        self._active: Any = None
        """The cycle whose response runs. `cycle` is the latest one, which may wait for it."""
        self._is_resuming = False
        """Whether the parser reads the head that `_resume_at_body` gives it."""
        self._refusal: TandemError | None = None
        self._began_at = time.perf_counter()
        """When the latest request began; the connection, before its first request."""
        self._is_deaf = False
        """Whether all further input is discarded."""

    # -------------------------------------------------------------------------------------------------- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client)
        self.owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.closed(self)
        self.pipeline.clear()
        active = self._active
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if active is not None and not active.response_complete:  # uvicorn tells the latest request only
            active.disconnected = True
            active.message_event.set()
        # What is left of the requests refers to this connection: as a cycle all of it would stay for long.
        self.cycle = self.scope = self._active = None  # type: ignore[assignment]

    @property
    def is_waiting_for_us(self) -> bool:
        return self.flow.read_paused or (self.cycle is not None and self.cycle.waiting_for_100_continue)

    def abort(self) -> None:
        self.transport.abort()

    # ------------------------------------------------------------------------------------------------------- input

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.owner.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self.owner.read_buffer[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        body = self._body
        if self._stage != "body":
            self._head_bytes += len(data)
        elif body is not None:
            body.num_wire_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.refuse(self._refusal or MalformedRequest("the request is not valid HTTP/1.1; correct it"))
        else:
            self._check_progress(body)

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._body is None:  # refused by the endpoint; what follows is not HTTP
                self._end_input()
                return
            self._resume_at_body()
            self._parse(data[upgrade.args[0] :])

    def _resume_at_body(self) -> None:
        """Go on with the body of a request that asks for another protocol, which is not granted (RFC 9110, 7.8).

        Such requests are ordinary: Java's HttpClient sends `Upgrade: h2c` with the first request of a connection. The
        parser takes what follows for the other protocol; so another one goes on after a head with the same framing.
        """
        framing = "Transfer-Encoding: chunked" if self._is_chunked else f"Content-Length: {self._content_length}"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._is_resuming = True
        self.parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
        self._is_resuming = False

    def _check_progress(self, body: Body | None) -> None:
        """Refuse a head that is too large though incomplete, and a body that is mostly framing."""
        if body is not None and body is self._body:
            framing = body.num_wire_bytes - body.num_bytes
            if framing > self.owner.limits.max_head_bytes + _FRAMING_RATIO * body.num_bytes:
                self.refuse(
                    MalformedRequest(
                        f"the chunks of the body have {framing:,} bytes of framing for {body.num_bytes:,} bytes; "
                        "send larger chunks"
                    )
                )
            return
        if self._stage == "body":
            return
        if self._head_bytes > self.owner.limits.max_head_bytes:
            self.refuse(self._too_large(self._head_bytes))
        elif self._stage == "head" or self._active is None or self._active.response_complete:
            self.owner.head_began(self)

    def _too_large(self, num_bytes: int) -> HeadTooLarge:
        limit = self.owner.limits.max_head_bytes
        return HeadTooLarge(
            f"the request's head has {num_bytes:,} bytes or more, the limit is {limit:,}; send shorter headers"
        )

    def _refused(self, error: TandemError) -> TandemError:
        """Keep `error` for the answer, and return it to be raised, which stops the parser."""
        self._refusal = error
        return error

    # ----------------------------------------------------------------------------------------- callbacks of the parser

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self._began_at = time.perf_counter()
        self._stage = "head"
        self._line_bytes = self._num_lines = 0
        self._content_length, self._is_chunked = None, False

    def on_url(self, url: bytes) -> None:
        if self._is_resuming:
            return
        if len(self.url) + len(url) > MAX_URL_BYTES:
            raise self._refused(
                UrlTooLong(f"the URL has more than {MAX_URL_BYTES:,} bytes, which is the limit; send a shorter one")
            )
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        self._num_lines += 1
        self._line_bytes += len(name) + len(value) + 4  # ": " and CRLF
        if self._num_lines > MAX_HEADERS:
            raise self._refused(
                HeadTooLarge(f"the request has more than {MAX_HEADERS} headers, which is the limit; send fewer")
            )
        if self._line_bytes > self.owner.limits.max_head_bytes:
            raise self._refused(self._too_large(self._line_bytes))
        if self._stage == "body":  # a trailer; nothing here reads trailers
            return
        super().on_header(name, value)
        name = self.headers[-1][0]
        if name == b"content-length":
            self._content_length = int(value)  # the parser has refused what is no number below 2**64
        elif name == b"transfer-encoding":
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        num_bytes = len(self.url) + self._line_bytes
        if num_bytes > self.owner.limits.max_head_bytes:
            raise self._refused(self._too_large(num_bytes))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(MalformedRequest("too many requests wait on this connection"))
        if self._is_chunked or self._content_length:
            expected = None if self._is_chunked else self._content_length
            try:
                self._body = self.owner.body_began(self, expected)
            except TandemError as error:
                raise self._refused(error) from error
        super().on_headers_complete()
        self._stage = "body"
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        self.scope["state"]["head_read_at"] = time.perf_counter()
        self.scope["state"]["response_starts"] = _ResponseStarts(self, self.cycle, self._body)
        if self._body is not None:
            self.scope["state"]["body_hold"] = BodyHold(self.owner, self._body)
        self.owner.head_ended(self)

    def on_body(self, body: bytes) -> None:
        received = self._body
        if received is not None:
            try:
                self.owner.body_received(received, len(body))
            except TandemError as error:
                raise self._refused(error) from error
            limit = self.owner.limits.max_body_bytes
            if received.num_bytes > limit + _SLACK_BYTES and not self.cycle.response_complete:
                raise self._refused(
                    BodyTooLarge(f"the body has more than {limit:,} bytes, which is the limit; send a smaller body")
                )
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body is not None and self.parser.should_upgrade():  # the body follows
            return
        self._stage, self._head_bytes, self._body = "between", 0, None
        self.owner.body_ended(self)
        super().on_message_complete()

    # ---------------------------------------------------------------------------------------------------- responses

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._stage == "head":  # the next request is coming; its head has a time limit of its own
            self._unset_keepalive_if_required()

    def close_after_response(self) -> None:
        """Close the connection, without a reset if the client may still be sending."""
        if self._is_deaf or self._body is not None:
            self._linger()
        else:
            self.transport.close()

    # ----------------------------------------------------------------------------------------------------- refusals

    def head_timed_out(self, error: TandemError) -> None:
        if self._stage == "between" and not self._head_bytes:  # it has sent nothing: nothing to answer
            self.owner.refused(type(error).__name__)
            self.transport.close()
        else:
            self.refuse(error)

    def refuse(self, error: TandemError) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        self.owner.refused(type(error).__name__)
        if self._stage == "body":
            self._refuse_body(error)
        elif self._active is not None and not self._active.response_complete:
            self._end_input()  # the answers of earlier requests come first
        else:
            self._answer(error)

    def _refuse_body(self, error: TandemError) -> None:
        cycle = self.cycle
        if cycle is not self._active or cycle.response_started:
            self.abort()
            return
        self._answer(error)
        cycle.disconnected = True  # the application stops waiting for the rest
        cycle.message_event.set()

    def _answer(self, error: TandemError) -> None:
        request_id = str(uuid4())
        status, body, headers = error_answer(error_format_of(self._path()), error, request_id)
        content = msgspec.json.encode(body)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [f"{name}: {value}".encode() for name, value in headers.items()]
        lines += [
            b"content-type: application/json",
            b"content-length: " + str(len(content)).encode(),
            b"connection: close",
            f"cf-ai-req-id: {request_id}".encode(),
            f"x-request-id: {request_id}".encode(),
            f"server-timing: total;dur={1000 * (time.perf_counter() - self._began_at):.3f}".encode(),
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + content)
        self._linger()

    def _path(self) -> str:
        """Return the path of the latest request, or what has come of it."""
        url: bytes = getattr(self, "url", b"")
        return unquote(url.partition(b"?")[0].decode("latin-1"))

    def _end_input(self) -> None:
        """Discard all further input, and close once the running responses are complete."""
        self._is_deaf = True
        self.owner.head_ended(self)
        if self.cycle is None or self.cycle.response_complete:
            self._linger()
        else:
            self.cycle.keep_alive = False

    def _linger(self) -> None:
        """Tell the client that no more comes, and discard what it sends until it closes or its time is over."""
        if self.transport.is_closing():
            return
        self._is_deaf = True
        self._unset_keepalive_if_required()
        self.owner.lingers(self)
        self.flow.resume_reading()
        self.transport.write_eof()


class _ResponseTransport:
    """The transport of a response: it closes the connection in the way that the protocol chooses."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_response


class _ResponseStarts:
    """Called before the first byte of a response: the body no longer counts, and its rest may be unwanted."""

    def __init__(self, protocol: BoundedProtocol, cycle: Any, body: Body | None) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._body = body

    def __call__(self) -> None:
        body, cycle = self._body, self._cycle
        if body is None:
            return
        self._protocol.owner.release(body)
        if not cycle.more_body:
            return
        missing = body.num_missing_bytes
        if cycle.waiting_for_100_continue or missing is None or missing > _SMALL_BYTES:
            cycle.keep_alive = False
