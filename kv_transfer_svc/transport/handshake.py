"""Negotiates links between KV services: who may open one, over which transports, with which token.

`OpenLink` is signed with the link key, which only KV services get from the control plane. The reply names the
transports and carries a token for data connections. Tokens are valid for this incarnation of the service only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Callable

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import InvalidRequest, StaleIncarnation, Unauthenticated, Unavailable
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.mac import MAC_BYTES

TOKEN_SECONDS = 60.0
_TOKEN_MAC_BYTES = 16
_EXPIRY = struct.Struct("<Q")


class LinkHandshake:
    """Answers `OpenLink`. A transport other than gRPC is offered once its address is set here."""

    def __init__(
        self, incarnation: str, keys: Callable[[], KvKeys], clock: Callable[[], float], macs_until: float = 0.0
    ) -> None:
        """Until `macs_until` (seconds since the epoch), requests of KV services of release 0.2 are answered."""
        self.address = ""
        """The advertised address; "" until it is known."""
        self.host_id = ""
        self.kv_socket = ""
        self.tcp_address = ""
        self.identity = ""
        """The URI of the certificate on data connections; "": they are in plain text."""
        self.tokens = DataTokens(incarnation, clock)
        self._incarnation = incarnation
        self._keys = keys
        self._macs_until = macs_until

    def answer(self, request: kv.OpenLinkRequest) -> kv.OpenLinkReply:
        """Return the reply.

        Raises Unauthenticated unless a KV service of this fleet signed the request, and for this service.
        """
        if not self._is_signed(request):
            raise Unauthenticated(
                f"incarnation {request.incarnation[:256]!r} requests a link with a wrong MAC; give all gateways one "
                "secret, and set --hmac-handles-until here while KV services of release 0.2 run",
                field="link_mac",
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
            identity=self.identity,
        )

    def _is_signed(self, request: kv.OpenLinkRequest) -> bool:
        keys = self._keys()
        _check_registered(keys)
        if keys.link_key and hmac.compare_digest(_mac(request, keys.link_key), request.link_mac):
            return True
        is_old_accepted = bool(keys.mac_key) and time.time() < self._macs_until
        return is_old_accepted and hmac.compare_digest(_mac(request, keys.mac_key), request.mac)


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


def link_request(incarnation: str, holder_address: str, keys: KvKeys) -> kv.OpenLinkRequest:
    """Return the signed request of a reader for the service at `holder_address`, whatever its release."""
    _check_registered(keys)
    request = kv.OpenLinkRequest(incarnation=incarnation, holder_address=holder_address)
    if keys.link_key:
        request.link_mac = _mac(request, keys.link_key)
    if keys.mac_key:
        request.mac = _mac(request, keys.mac_key)
    return request


def _check_registered(keys: KvKeys) -> None:
    if not keys.link_key and not keys.mac_key:
        raise Unavailable("this KV service has not registered with a control plane yet: it has no key for links")


def _mac(request: kv.OpenLinkRequest, key: bytes) -> bytes:
    if "\0" in request.incarnation:  # it separates the fields below
        raise InvalidRequest("an incarnation has no zero character", field="incarnation")
    text = f"link\0{request.incarnation}\0{request.holder_address}"
    return hmac.digest(key, text.encode(), hashlib.sha256().name)[:MAC_BYTES]
