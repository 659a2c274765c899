"""Lets a process with a certificate talk to processes of release 0.2, which have none, until a set time.

A server of release 0.2 takes plain text only, and a server of this release takes TLS. A client learns which by a probe:
it sends the first message of a TLS handshake, and looks at the answer.

    a TLS record           TLS. A server that has answered so once is never again called in plain text.
    an HTTP/2 frame        plain text; looked at again after PLAIN_SECONDS, since the process may have been replaced
    no answer              not known: nothing is sent
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

from tandem_runtime.errors import Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

TLS_HANDSHAKE = 0x16
"""The first byte of a TLS connection (RFC 8446, section 5.1). A plain HTTP/2 connection begins with "P"."""

PLAIN_SECONDS = 3.0
"""Seconds for which a server that answered in plain text is not asked again."""

PROBE_SECONDS = 2.0

_TLS_ALERT = 0x15
_HTTP2_HEADER_BYTES = 9
_HTTP2_SETTINGS, _HTTP2_GOAWAY = 4, 7
"""Types of HTTP/2 frames (RFC 9113, section 6), in byte 3 of a frame: what a server sends first."""

_MAX_KNOWN = 4096


class Plaintext:
    """Which calls this process may make and take in plain text. `clock` gives Unix seconds. On one event loop."""

    def __init__(self, until: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        """`until` is in Unix seconds; 0: never."""
        self.until = until
        self._clock = clock
        self._encrypted: dict[str, None] = {}
        self._plain_until: dict[str, float] = {}

    @property
    def is_allowed(self) -> bool:
        return self._clock() < self.until

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self.until - self._clock())

    async def takes_tls(self, address: str) -> bool:
        """Return whether the server at `address` is to be called over TLS: always, once the set time has passed.

        Raises Unavailable if it gives no answer from which this can be told.
        """
        if address in self._encrypted or not self.is_allowed:
            return True
        now = time.monotonic()
        if self._plain_until.get(address, 0.0) > now:
            return False
        takes_tls = await _probe(address)
        if takes_tls:
            self._plain_until.pop(address, None)
            _keep(self._encrypted, address, None)
        else:
            if address not in self._plain_until:
                log.warning("plaintext_server", address=address, until=int(self.until))
            _keep(self._plain_until, address, now + PLAIN_SECONDS)
        return takes_tls


def _keep(known: dict[str, Any], address: str, value: Any) -> None:
    """Set a value, and drop the oldest: callers choose the addresses."""
    known[address] = value
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


async def _probe(address: str) -> bool:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            answer = await _answer(address)
    except TimeoutError as error:
        raise Unavailable(f"{address} has not answered within {PROBE_SECONDS:g} s") from error
    except OSError as error:
        raise Unavailable(f"cannot connect to {address}: {error}") from error
    if answer[:1] in (bytes([TLS_HANDSHAKE]), bytes([_TLS_ALERT])):
        return True
    if len(answer) > 3 and answer[3] in (_HTTP2_SETTINGS, _HTTP2_GOAWAY):
        return False
    raise Unavailable(f"{address} answers neither over TLS nor as a gRPC server in plain text; check the address")


async def _answer(address: str) -> bytes:
    """Return the first bytes that the server at `address` answers to the beginning of a TLS handshake."""
    target = address.removeprefix("dns:///")
    if target.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(target.removeprefix("unix:"))
    else:
        host, _, port = target.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(_client_hello())
        return await reader.readexactly(_HTTP2_HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.close()


def _client_hello() -> bytes:
    """Return the first message of a TLS handshake. It names nobody, and nothing else follows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    handshake = context.wrap_bio(ssl.MemoryBIO(), sent)
    try:
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("a handshake waits for the server")
