"""Reads and changes the rows of the fleet's members and of their certificates. All functions run in a transaction."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import sqlalchemy as sa

from control_plane.fleet_identity import denials
from control_plane.storage.tables import certificates, members
from tandem_runtime.certificates.names import Identity, Role

RENEWABLE_MS = 30 * 86_400_000
"""An expired certificate renews for so long, unless it is revoked."""

MAX_HOST_CHARACTERS = 64


@dataclass(frozen=True)
class Member:
    """A process that has joined. Times are milliseconds since 1970 in UTC."""

    identity: Identity
    host: str
    joined_ms: int
    revoked_ms: int | None
    expires_ms: int
    """Of its latest certificate."""
    bundle: int
    """The number of the newest trust bundle that it got."""

    def state(self, now_ms: int) -> Literal["active", "expired", "revoked"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "active" if self.expires_ms > now_ms else "expired"


def add(
    connection: sa.Connection, fleet: str, role: Role, host: str, joined_key: bytes, join_token: str | None, now_ms: int
) -> Identity:
    """Make the identity of a new member: nobody chooses an id."""
    identity = Identity(fleet, role, secrets.token_hex(8))
    row = {"id": identity.id, "role": role, "host": _shown(host), "join_token": join_token}
    connection.execute(sa.insert(members).values(row | {"joined_key": joined_key, "joined_ms": now_ms}))
    return identity


def joined_with(connection: sa.Connection, fleet: str, join_token: str, joined_key: bytes) -> Identity | None:
    """Return who has joined with this token and this key: a repeated call gets the same identity."""
    is_it = (members.c.join_token == join_token) & (members.c.joined_key == joined_key)
    row = connection.execute(sa.select(members.c.id, members.c.role).where(is_it)).first()
    return Identity(fleet, cast(Role, row.role), row.id) if row else None


def is_known(connection: sa.Connection, identity: Identity) -> bool:
    """Return whether a member has a row. A revocation of it waits until this transaction ends."""
    wanted = sa.select(members.c.role).where(members.c.id == identity.id)
    return connection.execute(wanted.with_for_update(read=True)).scalar() == identity.role


def restore(connection: sa.Connection, identity: Identity, joined_key: bytes, now_ms: int) -> None:
    """Write the row of a member that joined after the backup from which the fleet was restored."""
    row = {"id": identity.id, "role": identity.role, "host": "", "join_token": None}
    connection.execute(sa.insert(members).values(row | {"joined_key": joined_key, "joined_ms": now_ms}))


def save_certificate(
    connection: sa.Connection,
    serial: str,
    identity: Identity,
    key: bytes,
    authority: int,
    bundle: int,
    issued_ms: int,
    expires_ms: int,
) -> None:
    row = {"serial": serial, "member": identity.id, "key": key, "authority": authority, "bundle": bundle}
    connection.execute(sa.insert(certificates).values(row | {"issued_ms": issued_ms, "expires_ms": expires_ms}))


def has_issued(connection: sa.Connection, serial: str, identity: Identity, key: bytes) -> bool:
    """Return whether the fleet issued exactly this certificate."""
    is_it = (certificates.c.serial == serial) & (certificates.c.member == identity.id) & (certificates.c.key == key)
    return connection.execute(sa.select(certificates.c.serial).where(is_it)).first() is not None


def read_all(connection: sa.Connection, fleet: str) -> list[Member]:
    """Return the members, those that joined first in front."""
    latest = sa.func.max(certificates.c.expires_ms).label("expires_ms")
    bundle = sa.func.max(certificates.c.bundle).label("bundle")
    joined = sa.select(members, latest, bundle).outerjoin(certificates, certificates.c.member == members.c.id)
    rows = connection.execute(joined.group_by(members.c.id).order_by(members.c.joined_ms, members.c.id)).mappings()
    return [_member(row, fleet) for row in rows]


def revoke(connection: sa.Connection, identity: Identity, now_ms: int, longest_ms: int) -> int:
    """Deny a member for as long as any of its certificates lives; return the denial's number.

    `longest_ms`: the longest time that a certificate lives, for a member of which no certificate is known.
    """
    if (number := denials.number_of(connection, identity.uri)) is not None:
        return number
    is_it = members.c.id == identity.id
    connection.execute(sa.update(members).where(is_it & members.c.revoked_ms.is_(None)).values(revoked_ms=now_ms))
    last = sa.select(sa.func.max(certificates.c.expires_ms)).where(certificates.c.member == identity.id)
    expires_ms = connection.execute(last).scalar()
    # An expired one could be renewed, so the denial stays for longer than the certificate lives.
    until_ms = max(now_ms + longest_ms, expires_ms or 0) + RENEWABLE_MS
    return denials.add(connection, identity.uri, now_ms, until_ms)


def delete_old(connection: sa.Connection, now_ms: int) -> None:
    """Delete certificates that cannot be renewed any more, and members without any other."""
    is_old = certificates.c.expires_ms < now_ms - RENEWABLE_MS
    connection.execute(sa.delete(certificates).where(is_old))
    has_one = sa.select(certificates.c.member).where(certificates.c.member == members.c.id).exists()
    is_new = members.c.joined_ms >= now_ms - RENEWABLE_MS
    connection.execute(sa.delete(members).where(~has_one & ~is_new))


def last_expiry(connection: sa.Connection, authority: int) -> int | None:
    """Return when the last certificate of an authority expires; None if it issued none."""
    wanted = sa.select(sa.func.max(certificates.c.expires_ms)).where(certificates.c.authority == authority)
    return connection.execute(wanted).scalar()


def ids_without(connection: sa.Connection, fleet: str, bundle: int, now_ms: int) -> list[Identity]:
    """Return the members that could be served and have not got trust bundle `bundle` yet."""
    return [
        member.identity
        for member in read_all(connection, fleet)
        if member.state(now_ms) == "active" and member.bundle < bundle
    ]


def _member(row: Mapping[Any, Any], fleet: str) -> Member:
    identity = Identity(fleet, cast(Role, row["role"]), row["id"])
    times = {name: row[name] for name in ("joined_ms", "revoked_ms")}
    return Member(identity, row["host"], expires_ms=row["expires_ms"] or 0, bundle=row["bundle"] or 0, **times)


def _shown(host: str) -> str:
    """Return a name that can be printed: what a process calls its host is only a text."""
    return "".join(character for character in host if character.isprintable())[:MAX_HOST_CHARACTERS]
