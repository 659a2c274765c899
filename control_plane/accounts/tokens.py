"""API tokens: their form, their scopes, and the digest that is stored.

A token is `tdm_` and 256 random bits. Only its SHA-256 is stored. Nobody can guess 256 bits, so a slow salted hash, as
passwords need, would make requests slower and no token safer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tandem_runtime.errors import InvalidRequest

Scope = Literal["inference", "usage", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""inference: run models; usage: read the account's usage; admin: everything, for every account."""

PREFIX = "tdm_"
_NUM_BYTES = 32
_NUM_CHARACTERS = len(PREFIX) + 43  # base64 without padding


@dataclass(frozen=True)
class Token:
    """A stored token, without its secret. Times are milliseconds since 1970 in UTC."""

    id: str
    account: str
    name: str
    scopes: frozenset[Scope]
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    used_ms: int | None = None
    """To the minute."""

    def state(self, now_ms: int) -> Literal["active", "revoked", "expired"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "active"

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


def new_secret() -> str:
    """Return the secret of a new token, which its owner sees once."""
    return PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def digest_of(secret: str) -> bytes | None:
    """Return the digest by which a token is stored; None if `secret` does not have a token's form."""
    if len(secret) != _NUM_CHARACTERS or not secret.startswith(PREFIX) or not secret.isascii():
        return None
    return hashlib.sha256(secret.encode()).digest()


def checked_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """Return scopes by their names. Raise InvalidRequest for an unknown scope or for no scope."""
    wanted = frozenset(names)
    unknown = sorted(wanted - set(SCOPES))
    if unknown or not wanted:
        raise InvalidRequest(
            f"scopes has {', '.join(unknown) or 'none'}; choose from {', '.join(SCOPES)}", field="scopes"
        )
    return frozenset(scope for scope in SCOPES if scope in wanted)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
