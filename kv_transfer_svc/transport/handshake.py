"""Negotiates links between KV services: who may open one, over which transports, with which token.

`OpenLink` is signed with the fleet's handle key. The reply names the transports and carries a token for data
connections. Tokens are valid for this incarnation of the service only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, StaleIncarnation, Unauthenticated, Unavailable
from tandem_runtime.kv.mac import MAC_BYTES

TOKEN_SECONDS = 60.0
_TOKEN_MAC_BYTES = 16
_EXPIRY = struct.Struct("<Q")


class LinkHandshake:
    """Answers `OpenLink`. A transport other than gRPC is offered once its address is set here."""

    def __init__(self, incarnation: str, handle_key: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self.address = ""
        """The advertised address; "" until it is known."""
        self.host_id = ""
        self.kv_socket = ""
        self.tcp_address = ""
        self.tokens = DataTokens(incarnation, clock)
        self._incarnation = incarnation
        self._handle_key = handle_key

    def answer(self, request: kv.OpenLinkRequest) -> kv.OpenLinkReply:
        """Return the reply.

        Raises Unauthenticated unless a KV service of this fleet signed the request, and for this service.
        """
        if not hmac.compare_digest(_mac(request, self._handle_key()), request.mac):
            raise Unauthenticated(
                f"incarnation {request.incarnation} requests a link with a wrong MAC: do all KV services share one "
                "handle key?",
                field="mac",
            )
        if self.address and request.holder_address != self.address:  # somebody repeats what another holder received
            raise Unauthenticated(
                f"incarnation {request.incarnation} requests a link with {request.holder_address}, "
                f"this KV service is {self.address}",
                field="holder_address",
            )
        return kv.OpenLinkReply(
            incarnation=self._incarnation,
            host_id=self.host_id,
            kv_socket=self.kv_socket,
            tcp_address=self.tcp_address,
            token=self.tokens.new(),
            token_ms=int(TOKEN_SECONDS * 1000),
        )


class DataTokens:
    """Mints and verifies tokens for data connections. A token is an expiry and a MAC over it; no token is stored."""

    def __init__(self, incarnation: str, clock: Callable[[], float]) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def new(self) -> bytes:
        """Return a token that is valid for TOKEN_SECONDS."""
        expiry = _EXPIRY.pack(int((self._clock() + TOKEN_SECONDS) * 1000))
        return expiry + self._mac(expiry)

    def verify(self, request: kv.DataRequest) -> None:
        """Raise StaleIncarnation or Unauthenticated, both with field "token", if the reader needs a new token."""
        if request.incarnation != self._incarnation:
            raise StaleIncarnation(
                f"the data connection is meant for incarnation {request.incarnation}, this is {self._incarnation}",
                field="token",
            )
        expiry, mac = request.token[: _EXPIRY.size], request.token[_EXPIRY.size :]
        if not hmac.compare_digest(self._mac(expiry), mac):
            raise Unauthenticated("the token of the data connection is not one of ours", field="token")
        if _EXPIRY.unpack(expiry)[0] <= self._clock() * 1000:
            raise Unauthenticated(f"the token of the data connection is older than {TOKEN_SECONDS:g} s", field="token")

    def _mac(self, expiry: bytes) -> bytes:
        return hmac.digest(self._key, expiry, hashlib.sha256().name)[:_TOKEN_MAC_BYTES]


def link_request(incarnation: str, holder_address: str, handle_key: bytes) -> kv.OpenLinkRequest:
    """Return the signed request of a reader for the service at `holder_address`."""
    request = kv.OpenLinkRequest(incarnation=incarnation, holder_address=holder_address)
    request.mac = _mac(request, handle_key)
    return request


def _mac(request: kv.OpenLinkRequest, key: bytes) -> bytes:
    if not key:
        raise Unavailable("this KV service has not registered with a control plane yet: it has no handle key for links")
    if "\0" in request.incarnation:  # it separates the fields below
        raise InvalidRequest("an incarnation has no zero character", field="incarnation")
    text = f"link\0{request.incarnation}\0{request.holder_address}"
    return hmac.digest(key, text.encode(), hashlib.sha256().name)[:MAC_BYTES]
