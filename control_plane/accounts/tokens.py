"""What is an API token, and what is kept of it?

A token is `tdm_` and 256 random bits. Only its SHA-256 is stored: nobody can guess 256 bits, so a slow hash with a
salt, as passwords need, would make every request dearer and no token safer.
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
"""inference: run models; usage: read what the account has used; admin: everything, for every account."""

PREFIX = "tdm_"
_NUM_BYTES = 32
_NUM_CHARACTERS = len(PREFIX) + 43  # base64 without padding


@dataclass(frozen=True)
class Token:
    """A token as it is stored: never the secret itself. Times are milliseconds since 1970 in UTC."""

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
    """Return a new token as its owner is shown it, once."""
    return PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def digest_of(secret: str) -> bytes | None:
    """Return what a token is found by; None for what cannot be one, which the database need not be asked about."""
    if len(secret) != _NUM_CHARACTERS or not secret.startswith(PREFIX) or not secret.isascii():
        return None
    return hashlib.sha256(secret.encode()).digest()


def checked_scopes(names: Iterable[str]) -> frozenset[Scope]:
    """Return scopes by their names; raises InvalidRequest for one that is none, and for no scope at all."""
    wanted = frozenset(names)
    unknown = sorted(wanted - set(SCOPES))
    if unknown or not wanted:
        raise InvalidRequest(
            f"scopes has {', '.join(unknown) or 'none'}; choose from {', '.join(SCOPES)}", field="scopes"
        )
    return frozenset(scope for scope in SCOPES if scope in wanted)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
