"""Reads and changes the fleet's certificate authorities, and decides which are trusted and which one issues.

A fleet has one authority, or two while it is rotated:

    added      trusted by everybody who renews; issues nothing
    issuing    the newest authority that issues; the one before is trusted until its last certificate has expired
    left       not trusted; its private key is deleted
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from control_plane.fleet_identity.certificates import authority_certificate, new_key, pem
from control_plane.fleet_identity.sealed_key import seal
from control_plane.storage.database import Database
from control_plane.storage.tables import authorities
from tandem_runtime.errors import InvalidRequest


@dataclass(frozen=True)
class Authority:
    """One row. Times are milliseconds since 1970 in UTC."""

    number: int
    fleet: str
    certificate: x509.Certificate
    created_ms: int
    issues_from_ms: int | None = None
    leaves_ms: int | None = None
    sealed_key: bytes | None = field(default=None, repr=False)

    def is_trusted(self, now_ms: int) -> bool:
        """Return whether it has not left. Without its key it has left for good, also if the clock goes back."""
        return self.sealed_key is not None and (self.leaves_ms is None or self.leaves_ms > now_ms)


@dataclass(frozen=True)
class Trust:
    """The authorities of a fleet at one moment, by number."""

    authorities: tuple[Authority, ...]
    now_ms: int

    @property
    def fleet(self) -> str:
        return self.authorities[0].fleet

    @property
    def trusted(self) -> tuple[Authority, ...]:
        """One or two: a third one that a clock brings back when it is set back stays away."""
        return tuple(each for each in self.authorities if each.is_trusted(self.now_ms))[-2:]

    @property
    def bundle(self) -> bytes:
        """The certificates that every process trusts, in PEM."""
        return pem(*(each.certificate for each in self.trusted))

    @property
    def bundle_number(self) -> int:
        """A number that grows with each change of the bundle: {1}: 2, {1, 2}: 3, {2}: 4, {2, 3}: 5."""
        return 2 * self.trusted[-1].number - (len(self.trusted) - 1)

    @property
    def issuing(self) -> Authority:
        """The authority that signs new certificates."""
        return max(
            (each for each in self.trusted if each.issues_from_ms is not None), key=lambda authority: authority.number
        )

    @property
    def oldest(self) -> Authority:
        """The trusted authority that most processes and join tokens know: it names the enrolment port."""
        return min(
            (each for each in self.trusted if each.issues_from_ms is not None), key=lambda authority: authority.number
        )

    @property
    def added(self) -> Authority | None:
        """The authority that is trusted and does not issue yet."""
        return next((each for each in self.trusted if each.issues_from_ms is None), None)


def read_trust(connection: sa.Connection, now_ms: int, *, locked: bool = False) -> Trust | None:
    """Return the fleet's authorities; None before the first one was made.

    `locked`: nobody changes them before this transaction ends. On SQLite no other transaction writes anyhow.
    """
    wanted = sa.select(authorities).order_by(authorities.c.number)
    if locked:
        wanted = wanted.with_for_update(read=True)
    rows = connection.execute(wanted).mappings().all()
    return Trust(tuple(_authority(row) for row in rows), now_ms) if rows else None


def add_first(database: Database, connection: sa.Connection, secret: bytes, now_ms: int) -> bool:
    """Make a fleet with its first authority. Return False if another gateway made it in the meantime."""
    row = new_row(secrets.token_hex(8), 1, secret, now_ms) | {"issues_from_ms": now_ms}
    made = connection.execute(database.insert(authorities).values(row).on_conflict_do_nothing())
    return made.rowcount == 1


def new_row(fleet: str, number: int, secret: bytes, now_ms: int) -> dict[str, Any]:
    """Return the row of a new authority that issues nothing yet."""
    key = new_key()
    certificate = authority_certificate(key, fleet, number, now_ms)
    return {
        "number": number,
        "fleet": fleet,
        "certificate": certificate.public_bytes(_DER),
        "sealed_key": seal(key, certificate, secret),
        "created_ms": now_ms,
    }


def add_next(connection: sa.Connection, trust: Trust, secret: bytes) -> int:
    """Add a second authority; return its number. Raise InvalidRequest while a rotation runs."""
    if len(trust.trusted) > 1:
        raise InvalidRequest(
            f"authorities {' and '.join(str(each.number) for each in trust.trusted)} are trusted already, and two is "
            "the limit; finish that rotation first: `tandem fleet rotate-ca --switch`, then wait until the old one "
            "has left, or `--remove-old`"
        )
    number = trust.authorities[-1].number + 1
    connection.execute(sa.insert(authorities).values(new_row(trust.fleet, number, secret, trust.now_ms)))
    return number


def switch(connection: sa.Connection, trust: Trust, leaves_ms: int) -> tuple[int, int]:
    """Let the added authority issue; the old one leaves at `leaves_ms`. Return both numbers, new first."""
    added, old = trust.added, trust.issuing
    if added is None:
        raise InvalidRequest("no authority was added that could issue; add one with `tandem fleet rotate-ca`")
    connection.execute(_update(added).values(issues_from_ms=trust.now_ms))
    connection.execute(_update(old).values(leaves_ms=leaves_ms))
    return added.number, old.number


def remove_old(connection: sa.Connection, trust: Trust) -> int:
    """Stop trusting the old authority at once; return its number. Raise InvalidRequest if there is none."""
    if trust.oldest is trust.issuing:
        raise InvalidRequest(
            "only one authority issues, and it cannot be removed; rotate first: `tandem fleet rotate-ca`, then "
            "`tandem fleet rotate-ca --switch`"
        )
    connection.execute(_update(trust.oldest).values(leaves_ms=trust.now_ms))
    return trust.oldest.number


def forget_keys_of_left(connection: sa.Connection, now_ms: int) -> None:
    """Delete the private keys of authorities that have left. Their certificates stay: they verify old renewals."""
    has_left = (authorities.c.leaves_ms <= now_ms) & authorities.c.sealed_key.is_not(None)
    connection.execute(sa.update(authorities).where(has_left).values(sealed_key=None))


def _update(authority: Authority) -> sa.Update:
    return sa.update(authorities).where(authorities.c.number == authority.number)


def _authority(row: Mapping[Any, Any]) -> Authority:
    certificate = x509.load_der_x509_certificate(row["certificate"])
    names = ("number", "fleet", "created_ms", "issues_from_ms", "leaves_ms", "sealed_key")
    return Authority(certificate=certificate, **{name: row[name] for name in names})


_DER = serialization.Encoding.DER
