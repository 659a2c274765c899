"""Join tokens in the database: made by an operator, used by processes that join.

A secret has 256 random bits, so only its SHA-256 is stored, without salt. The id finds the row; the digests are
compared in constant time. After ten wrong secrets an id is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import sqlalchemy as sa

from control_plane.storage.tables import join_tokens
from tandem_runtime.certificates.names import ROLES, Role
from tandem_runtime.enrolment.join_token import SECRET_BYTES, JoinToken, decoded
from tandem_runtime.errors import InvalidRequest, Unauthenticated

JOINING_ROLES: tuple[Role, ...] = tuple(role for role in ROLES if role != "gateway")
"""A gateway needs no token: it has the control plane's secret, and issues its own certificate."""

MAX_FAILURES = 10
LONGEST_SECONDS = 30 * 86_400
MAX_USES = 10_000
_MINUTE_MS = 60_000
_SHOWN_AFTER_MS = 7 * 86_400_000


@dataclass(frozen=True)
class StoredToken:
    """A row, without the secret."""

    id: str
    role: Role
    created_ms: int
    expires_ms: int
    max_uses: int
    num_uses: int
    num_failures: int


def check(role: str, seconds: float, uses: int) -> Role:
    """Check the values of a new token. Raise InvalidRequest."""
    if role == "gateway":
        raise InvalidRequest(
            "role is gateway, which joins without a token: start it with the fleet's database and secret", field="role"
        )
    if role not in JOINING_ROLES:
        raise InvalidRequest(f"role is {role[:32]!r}, must be one of {', '.join(JOINING_ROLES)}", field="role")
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise InvalidRequest(
            f"expires is {seconds:g} s, must be 1 s to {LONGEST_SECONDS // 86_400} days; make another token later",
            field="expires",
        )
    if not 1 <= uses <= MAX_USES:
        raise InvalidRequest(f"uses is {uses:,}, must be 1 to {MAX_USES:,}", field="uses")
    return role


def add(
    connection: sa.Connection,
    role: Role,
    seconds: float,
    uses: int,
    authorities: tuple[bytes, ...],
    addresses: tuple[str, ...],
    now_ms: int,
) -> JoinToken:
    """Make a token and store its digest."""
    token = JoinToken(secrets.token_hex(8), secrets.token_bytes(SECRET_BYTES), authorities, addresses)
    row = {"id": token.id, "digest": _digest(token.secret), "role": role, "created_ms": now_ms, "max_uses": uses}
    connection.execute(sa.insert(join_tokens).values(row | {"expires_ms": now_ms + round(seconds * 1000)}))
    return token


def find(connection: sa.Connection, credential: str, role: str, now_ms: int) -> StoredToken | Unauthenticated:
    """Return the token that `credential` proves and that admits `role`, or why it does not.

    A refusal is returned and not raised, so that the transaction that counts a wrong secret is committed.
    """
    token_id, _, secret = credential.partition(".")
    try:
        digest = _digest(decoded(secret))
    except InvalidRequest:
        digest = b""
    row = connection.execute(_BY_ID, {"id": token_id}).mappings().first()
    is_right = hmac.compare_digest(row["digest"] if row else _NO_DIGEST, digest)
    if row is None:
        return _unknown()
    if not is_right:
        more = {"num_failures": join_tokens.c.num_failures + 1}
        connection.execute(sa.update(join_tokens).where(join_tokens.c.id == token_id).values(more))
        return _unknown()
    token = StoredToken(**{name: row[name] for name in StoredToken.__dataclass_fields__})
    return _refusal(token, role, now_ms) or token


def use(connection: sa.Connection, token: StoredToken) -> Unauthenticated | None:
    """Use the token once; of several at once, as many succeed as it has uses. Return a refusal, or None."""
    has_one = (join_tokens.c.id == token.id) & (join_tokens.c.num_uses < join_tokens.c.max_uses)
    used = connection.execute(sa.update(join_tokens).where(has_one).values(num_uses=join_tokens.c.num_uses + 1))
    if used.rowcount == 1:
        return None
    times = "once" if token.max_uses == 1 else f"{token.max_uses:,} times"
    return Unauthenticated(
        f"the join token was used {times}, which is its limit; make another: `tandem fleet token --role {token.role}`",
        field="token",
    )


def delete_old(connection: sa.Connection, now_ms: int) -> None:
    connection.execute(sa.delete(join_tokens).where(join_tokens.c.expires_ms < now_ms - _SHOWN_AFTER_MS))


def _refusal(token: StoredToken, role: str, now_ms: int) -> Unauthenticated | None:
    again = f"make another: `tandem fleet token --role {token.role}`"
    if token.num_failures >= MAX_FAILURES:
        return Unauthenticated(
            f"the join token is closed: {token.num_failures} wrong secrets were sent with its id, the limit is "
            f"{MAX_FAILURES}; {again}",
            field="token",
        )
    if token.expires_ms <= now_ms:
        minutes = (now_ms - token.expires_ms) // _MINUTE_MS
        return Unauthenticated(f"the join token expired {minutes} minutes ago; {again}", field="token")
    if token.role != role:
        return Unauthenticated(
            f"the join token is for role {token.role}, this process is {role[:32]!r}; make one for it: "
            "`tandem fleet token --role ROLE`",
            field="role",
        )
    return None


def _unknown() -> Unauthenticated:
    return Unauthenticated(
        "the join token is not known to this fleet; copy the whole token, or make another: `tandem fleet token`",
        field="token",
    )


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


_NO_DIGEST = bytes(32)
_BY_ID = sa.select(join_tokens).where(join_tokens.c.id == sa.bindparam("id"))
