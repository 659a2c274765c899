"""Serves a process's metrics over HTTP: `GET /metrics`, for Prometheus.

On loopback in plain text. Beyond loopback over TLS with the process's certificate, which proves the process to the
reader; the reader needs no certificate. Without a certificate beyond loopback only where plain text is allowed.

A reading is made in a thread. Each connection has one request, a deadline, and a bounded head; connections are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import zlib
from collections.abc import Callable, Iterable, Iterator

from tandem_runtime import metrics
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger
from tandem_runtime.process_metrics import export_certificate
from tandem_runtime.prometheus_text import CONTENT_TYPE
from tandem_runtime.server import is_loopback, split_address

log = get_logger(__name__)

_MAX_CONNECTIONS = 16
_MAX_HEAD_BYTES = 16 << 10
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_GZIP_LEVEL = 1
_GZIP_FORMAT = 16


class MetricsEndpoint:
    """One listening address; "" for none. `address` and `is_encrypted` are known after `start`."""

    def __init__(
        self,
        listen: str,
        member: FleetMember | None = None,
        *,
        insecure: bool = False,
        read: Callable[[], Iterable[bytes]] = metrics.pieces,
    ) -> None:
        """`insecure` lets a process without `member` listen beyond loopback. `read` is called in a thread."""
        export_certificate(metrics.meter(), member)
        self._listen = listen
        self._member = member
        self._insecure = insecure
        self._read = read
        self._context: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._num_open = 0
        self._reading = asyncio.Lock()
        self.address = ""
        """The bound host:port; "" while nothing listens."""

    @property
    def is_encrypted(self) -> bool:
        return self._context is not None

    async def start(self) -> None:
        """Listen. Raise InvalidRequest where the process may not or cannot."""
        if not self._listen:
            return
        host, port = split_address(self._listen)
        if not await is_loopback(host):
            self._encrypt()
        try:
            self._server = await asyncio.start_server(
                self._serve,
                host.strip("[]"),
                port,
                limit=_MAX_HEAD_BYTES,
                ssl=self._context,
                **({"ssl_handshake_timeout": _REQUEST_SECONDS} if self._context is not None else {}),
            )
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on --metrics-listen {self._listen}: {error}; is the port taken? port 0 takes a free one"
            ) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        log.info("metrics_listening", address=self.address, tls=self.is_encrypted)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def address_for_others(self, own_address: str) -> str:
        """Return where others reach this endpoint, if they reach the process at `own_address`; "" if they cannot.

        The host of `own_address` stands for an endpoint on all addresses. One on loopback is of no use to others if
        the process itself is beyond loopback.
        """
        if not self.address or own_address.startswith("unix:"):
            return self.address
        host, port = split_address(self.address)
        own_host, _ = split_address(own_address)
        if _is(host, "is_unspecified"):
            return f"{own_host}:{port}"
        return "" if _is(host, "is_loopback") and not _is(own_host, "is_loopback") else self.address

    def _encrypt(self) -> None:
        if self._member is not None:
            self._context = self._member.certificate.listener_context()
        elif not self._insecure:
            raise InvalidRequest(
                f"--metrics-listen {self._listen} is beyond loopback and the process has no certificate; listen on "
                "127.0.0.1, give a certificate (--tls-cert), or say --insecure-plaintext if the network is trusted"
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with self._counted() as is_accepted:
                if is_accepted:
                    await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("metrics_request_ended", reason=str(error) or type(error).__name__)
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[bool]:
        self._num_open += 1
        try:
            yield self._num_open <= _MAX_CONNECTIONS
        finally:
            self._num_open -= 1

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_REQUEST_SECONDS):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status, body, more = await self._answer(head)
        num_bytes = sum(map(len, body))
        start = f"HTTP/1.1 {status}\r\nContent-Length: {num_bytes}\r\nConnection: close\r\n{more}\r\n"
        async with asyncio.timeout(_ANSWER_SECONDS):
            writer.write(start.encode())
            for piece in () if head.startswith(b"head ") else body:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # `drain` does not wait while the buffer has room
            await writer.drain()

    async def _answer(self, head: bytes) -> tuple[str, list[bytes], str]:
        """Return status, body and further header lines for a request's head in lower case."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return "404 Not Found", [b"the metrics are at /metrics\n"], _TEXT
        if method not in (b"get", b"head"):
            return "405 Method Not Allowed", [b"use GET\n"], f"Allow: GET, HEAD\r\n{_TEXT}"
        is_packed = accepts_gzip(_encodings(head))
        try:
            async with self._reading:
                body = await reading(self._read, is_packed=is_packed)
        except Exception:
            log.exception("metrics_reading_failed")
            return "500 Internal Server Error", [b"the reading failed; the process's log has the reason\n"], _TEXT
        headers = f"Content-Type: {CONTENT_TYPE}\r\nVary: Accept-Encoding\r\n"
        return "200 OK", body, f"{headers}Content-Encoding: gzip\r\n" if is_packed else headers


_TEXT = "Content-Type: text/plain; charset=utf-8\r\n"


async def reading(read: Callable[[], Iterable[bytes]], *, is_packed: bool) -> list[bytes]:
    """Return a reading, made in a thread, as gzip if `is_packed`: about 25 times smaller."""
    return await asyncio.to_thread(_read_all, read, is_packed)


def _read_all(read: Callable[[], Iterable[bytes]], is_packed: bool) -> list[bytes]:
    return list(_compressed(read())) if is_packed else list(read())


def _compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packing = zlib.compressobj(_GZIP_LEVEL, wbits=zlib.MAX_WBITS | _GZIP_FORMAT)
    yield from filter(None, map(packing.compress, pieces))
    yield packing.flush()


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether a client with this Accept-Encoding takes gzip (RFC 9110, section 12.5.3)."""
    for entry in accept_encoding.lower().split(","):
        coding, *parameters = (part.strip() for part in entry.split(";"))
        if coding in ("gzip", "*"):
            return all(parameter.rstrip("0.") != "q=" for parameter in parameters)
    return False


def _encodings(head: bytes) -> str:
    name = b"accept-encoding:"
    lines = (line for line in head.split(b"\r\n") if line.startswith(name))
    return b",".join(line.removeprefix(name) for line in lines).decode("latin-1")


def _is(host: str, what: str) -> bool:
    """Return a property of an address; a name is loopback if it is localhost."""
    try:
        return bool(getattr(ipaddress.ip_address(host.strip("[]")), what))
    except ValueError:
        return what == "is_loopback" and host == "localhost"
