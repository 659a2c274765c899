"""Encrypts data connections: TLS 1.3 with certificates of both sides, and only KV services at either end.

The reader knows from the handle who the holder is. OpenLink names the same identity, over the authenticated gRPC
channel, and the reader expects that certificate on the data connection. Each connection is registered with the
process's peers, which close it when the identity is revoked or its certificate expires.

Until `plaintext_until`, for the upgrade from release 0.2, the holder's port also takes plain text (the first byte
tells), and the reader reads holders that name no identity in plain text.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer_svc.transport.interface import LinkBroken
from kv_transfer_svc.transport.wires import PlainWire, TlsWire, Wire, until_ready
from tandem_runtime.certificates.names import Identity
from tandem_runtime.errors import TandemError, Unauthenticated

_TLS_HANDSHAKE = 0x16
"""The first byte of a TLS connection (RFC 8446, section 5.1); that of a plain one is the "T" of frames.py."""


class AdmittedPeer(Protocol):
    @property
    def identity(self) -> Identity: ...


class OpenedLink(Protocol):
    def end(self) -> None:
        """The connection has ended by itself."""


class LinkPeers(Protocol):
    """What this process has open, by identity. On the event loop; `close` is called there, at most once."""

    def admit(self, certificate: bytes | None, /) -> AdmittedPeer:
        """Return who a verified certificate (DER) is of; raises TandemError if revoked, expired or of another fleet."""

    def accepted(self, identity: Identity, close: Callable[[TandemError], None], /) -> OpenedLink: ...

    def dialled(self, identity: Identity, close: Callable[[TandemError], None], /) -> OpenedLink: ...


@dataclass(frozen=True)
class LinkTls:
    """What data connections need of this process's membership in the fleet."""

    identity: Identity
    ssl_context: Callable[[bool], ssl.SSLContext]
    """Returns a context with the current certificate, for the server's side if True. Called for each connection."""
    peers: LinkPeers
    plaintext_until: float = 0.0
    """Seconds since the epoch."""

    @property
    def takes_plaintext(self) -> bool:
        return time.time() < self.plaintext_until


async def accept_wire(sock: socket.socket, tls: LinkTls | None, stall_seconds: float) -> Wire:
    """Return the wire of an accepted connection, on the event loop; `sock` must not block.

    Raises OSError for a failed handshake, TandemError for a peer that is no KV service of this fleet. The caller closes
    `sock`, also afterwards.
    """
    if tls is None:
        return PlainWire(sock)
    if tls.takes_plaintext and await _first_byte(sock) != _TLS_HANDSHAKE:
        return PlainWire(sock)
    secured = tls.ssl_context(True).wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    return await _shake_hands(secured, tls, None, stall_seconds)


async def dial_wire(sock: socket.socket, tls: LinkTls | None, holder: str, stall_seconds: float) -> Wire:
    """Return the wire to the service that OpenLink named as `holder` ("": in plain text); otherwise as `accept_wire`.

    Raises LinkBroken if one side wants TLS and the other does not.
    """
    if tls is None and not holder:
        return PlainWire(sock)
    if tls is None:
        raise LinkBroken("the holder's data connections are over TLS, this KV service has no certificate; give it one")
    if not holder and tls.takes_plaintext:
        return PlainWire(sock)
    if not holder:
        raise LinkBroken("the holder's data connections are in plain text, this KV service reads over TLS only")
    try:
        expected = Identity.parse(holder)
    except ValueError as error:
        raise LinkBroken(f"the holder named itself wrongly: {error}") from error
    context = tls.ssl_context(False)
    secured = context.wrap_socket(sock, server_hostname=expected.dns_name, do_handshake_on_connect=False)
    return await _shake_hands(secured, tls, expected, stall_seconds)


async def _shake_hands(sock: ssl.SSLSocket, tls: LinkTls, expected: Identity | None, stall_seconds: float) -> TlsWire:
    try:
        while True:
            try:
                sock.do_handshake()
                break
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                await until_ready(sock, error)
        identity = tls.peers.admit(sock.getpeercert(binary_form=True)).identity
        _check(identity, expected)
    except BaseException:
        sock.close()  # it has taken over the caller's descriptor
        raise
    return TlsWire(sock, identity, stall_seconds)


def _check(identity: Identity, expected: Identity | None) -> None:
    if identity.role != "kv":
        raise Unauthenticated(f"{identity} is at a data connection; only KV services read from one another")
    if expected is not None and identity != expected:
        raise Unauthenticated(f"{identity} answered a data connection to {expected}")


async def _first_byte(sock: socket.socket) -> int:
    while True:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            await until_ready(sock)
        else:
            return first[0] if first else -1
