"""Who may fetch bytes over a data connection? Whoever was given a token over gRPC by this life of the service."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import StaleIncarnation, Unauthenticated

TOKEN_SECONDS = 60.0
_MAC_BYTES = 16
_EXPIRY = struct.Struct("<Q")


class Tokens:
    """Mints and verifies tokens; keeps none of them: a token is its expiry and a MAC over it."""

    def __init__(self, incarnation: str, clock: Callable[[], float]) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def new(self) -> bytes:
        """Return a token that holds for TOKEN_SECONDS."""
        expiry = _EXPIRY.pack(int((self._clock() + TOKEN_SECONDS) * 1000))
        return expiry + self._mac(expiry)

    def verify(self, request: kv.DataRequest) -> None:
        """Raise StaleIncarnation or Unauthenticated, both of field "token": another one must be asked for."""
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
        return hmac.digest(self._key, expiry, hashlib.sha256().name)[:_MAC_BYTES]
