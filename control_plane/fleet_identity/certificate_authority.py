"""The fleet's certificate authority: issues, renews and revokes certificates, and rotates its own key.

All state is in SQL, so every gateway on the database is the same authority. Each operation is one transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import sqlalchemy as sa
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy.exc import IntegrityError

from control_plane.fleet_identity import authorities, denials, join_tokens, members
from control_plane.fleet_identity.authorities import Authority, Trust, read_trust
from control_plane.fleet_identity.certificates import (
    MAX_REQUEST_BYTES,
    PrivateKey,
    PublicKey,
    authority_digest,
    key_digest,
    milliseconds,
    pem,
    process_certificate,
    requested_key,
    serial_of,
)
from control_plane.fleet_identity.members import RENEWABLE_MS, Member
from control_plane.fleet_identity.sealed_key import unseal
from control_plane.storage.database import Database
from tandem_runtime.certificates.names import Identity, Role, identity_in
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.enrolment.renewal_proof import renewal_proof
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError, Unauthenticated
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

VALIDITY_SECONDS = 86_400.0
LONGEST_VALIDITY_SECONDS = 30 * 86_400.0
_TRIES = 8
_EXTRA_MS = 60_000
"""The old authority leaves so long after its last certificate: clocks differ."""


@dataclass(frozen=True)
class Issued:
    """A new certificate, and what its process shall trust."""

    identity: Identity
    certificate: x509.Certificate
    bundle: bytes
    bundle_number: int
    authority: x509.Certificate
    issued_ms: int

    @property
    def chain(self) -> bytes:
        """The certificate and its authority's, in PEM."""
        return pem(self.certificate, self.authority)


class CertificateAuthority:
    """Call `open` first. Methods raise Unavailable while the database cannot be reached."""

    def __init__(self, database: Database, secret: bytes, validity_seconds: float = VALIDITY_SECONDS) -> None:
        if not 1 <= validity_seconds <= LONGEST_VALIDITY_SECONDS:
            raise InvalidRequest(
                f"a certificate's validity is {validity_seconds:g} s, must be 1 to {LONGEST_VALIDITY_SECONDS:g}"
            )
        self._database = database
        self._secret = secret
        self._validity_seconds = validity_seconds
        self._keys: dict[bytes, PrivateKey] = {}

    # ---------------------------------------------------------------------------------------------- authorities

    async def open(self) -> Trust:
        """Make the fleet's first authority if there is none. Raise InvalidRequest if the secret is not the fleet's."""
        made = await self._transaction(self._open)
        trust = await self.trust()
        self._key(trust.issuing)
        if made:
            log.info("fleet_made", fleet=trust.fleet, authority=trust.issuing.number)
        return trust

    def _open(self, connection: sa.Connection, now_ms: int) -> bool:
        if read_trust(connection, now_ms) is not None:
            return False
        return authorities.add_first(self._database, connection, self._secret, now_ms)

    async def trust(self) -> Trust:
        """Return the authorities. Raise InvalidRequest if there is none."""
        return await self._transaction(_read, single=True)

    async def add_authority(self) -> int:
        """Begin a rotation: a second authority that everybody gets to trust. Return its number."""
        number = await self._transaction(lambda connection, now_ms: self._add_authority(connection, now_ms))
        log.info("authority_added", authority=number)
        return number

    def _add_authority(self, connection: sa.Connection, now_ms: int) -> int:
        return authorities.add_next(connection, _read(connection, now_ms, locked=True), self._secret)

    async def switch_authority(self, *, force: bool = False) -> Trust:
        """Issue by the added authority from now on. Refuse while a member does not trust it, unless `force`."""
        await self._transaction(partial(self._switch, force=force))
        trust = await self.trust()
        log.info("authority_switched", authority=trust.issuing.number)
        return trust

    def _switch(self, connection: sa.Connection, now_ms: int, *, force: bool) -> None:
        trust = _read(connection, now_ms, locked=True)
        behind = members.ids_without(connection, trust.fleet, trust.bundle_number, now_ms)
        if trust.added is not None and behind and not force:
            raise InvalidRequest(
                f"{len(behind)} members do not trust authority {trust.added.number} yet, the first: "
                f"{', '.join(map(str, behind[:3]))}; they do after their next renewal: see `tandem fleet list`, or "
                "pass --force and cut them off"
            )
        longest_ms = round(self._validity_seconds * 1000)
        last_ms = members.last_expiry(connection, trust.issuing.number) or now_ms
        authorities.switch(connection, trust, max(last_ms, now_ms + longest_ms) + _EXTRA_MS)

    async def remove_old_authority(self) -> int:
        """End a rotation now: certificates of the old authority are refused. Return its number."""
        number = await self._transaction(
            lambda connection, now_ms: authorities.remove_old(connection, _read(connection, now_ms, locked=True))
        )
        log.info("authority_removed", authority=number)
        return number

    # ---------------------------------------------------------------------------------------------- certificates

    async def issue_gateway(self, public_key: PublicKey, host: str, earlier: Identity | None = None) -> Issued:
        """Return the certificate of a gateway that starts, which proves itself by the secret.

        It stays the member that it was at its `earlier` start, unless that one was revoked, or is none of this fleet's.
        """
        issue = partial(self._issue_gateway, public_key=public_key, host=host, earlier=earlier)
        return await self._transaction(issue)

    def _issue_gateway(
        self, connection: sa.Connection, now_ms: int, *, public_key: PublicKey, host: str, earlier: Identity | None
    ) -> Issued:
        trust = _read(connection, now_ms, locked=True)
        identity = earlier
        if identity is None or not _may_return(connection, trust, identity):
            identity = members.add(connection, trust.fleet, "gateway", host, key_digest(public_key), None, now_ms)
        return self._issue(connection, trust, trust.issuing, identity, public_key)

    async def issue_again(self, identity: Identity, public_key: PublicKey, *, by_oldest: bool = False) -> Issued:
        """Return another certificate of a gateway's own identity. Raise Unauthenticated if it is revoked.

        `by_oldest`: signed by the authority that most processes know, for the enrolment port.
        """
        issue = partial(self._issue_again, identity=identity, public_key=public_key, by_oldest=by_oldest)
        return await self._transaction(issue)

    def _issue_again(
        self, connection: sa.Connection, now_ms: int, *, identity: Identity, public_key: PublicKey, by_oldest: bool
    ) -> Issued:
        trust = _read(connection, now_ms, locked=True)
        self._check_member(connection, trust, identity, key_digest(public_key))
        return self._issue(connection, trust, trust.oldest if by_oldest else trust.issuing, identity, public_key)

    async def enrol(self, credential: str, role: str, certificate_request: bytes, host: str) -> Issued:
        """Admit a process with a join token. Raise Unauthenticated for the token, InvalidRequest for the rest."""
        public_key = requested_key(certificate_request)
        enrol = partial(self._enrol, credential=credential, role=role, public_key=public_key, host=host)
        issued = await self._transaction(enrol)
        if isinstance(issued, TandemError):
            raise issued
        return issued

    def _enrol(
        self, connection: sa.Connection, now_ms: int, *, credential: str, role: str, public_key: PublicKey, host: str
    ) -> Issued | Unauthenticated:
        trust = _read(connection, now_ms, locked=True)
        token = join_tokens.find(connection, credential, role, now_ms)
        if isinstance(token, Unauthenticated):
            return token
        digest = key_digest(public_key)
        identity = members.joined_with(connection, trust.fleet, token.id, digest)
        if identity is None:
            if refusal := join_tokens.use(connection, token):
                return refusal
            identity = members.add(connection, trust.fleet, token.role, host, digest, token.id, now_ms)
        self._check_member(connection, trust, identity, digest)
        return self._issue(connection, trust, trust.issuing, identity, public_key)

    async def renew(self, certificate: bytes, certificate_request: bytes, signature: bytes) -> Issued:
        """Replace a certificate (DER), if its key signed the request. Raise Unauthenticated or InvalidRequest.

        It may have expired up to 30 days ago: a machine that slept renews by itself.
        """
        public_key = requested_key(certificate_request)
        old = _parsed(certificate)
        _check_proof(old, certificate_request, signature)
        return await self._transaction(partial(self._renew, old=old, public_key=public_key))

    def _renew(self, connection: sa.Connection, now_ms: int, *, old: x509.Certificate, public_key: PublicKey) -> Issued:
        trust, old_key = _read(connection, now_ms, locked=True), key_digest(_p256_key(old))
        authority, identity = _signer_of(old, trust)
        # Whoever has stolen the key of an authority that has left could sign anything: only what it issued counts.
        if not authority.is_trusted(now_ms) and not members.has_issued(connection, serial_of(old), identity, old_key):
            raise Unauthenticated(
                f"certificate is of authority {authority.number}, which is trusted no more, and not in its records; "
                f"join again: `tandem fleet token --role {identity.role}`",
                field="certificate",
            )
        expired_ms = now_ms - milliseconds(old.not_valid_after_utc)
        if expired_ms > RENEWABLE_MS:
            raise Unauthenticated(
                f"the certificate of {identity} expired {expired_ms // _DAY_MS} days ago, the limit for a renewal is "
                f"{RENEWABLE_MS // _DAY_MS}; join again: `tandem fleet token --role {identity.role}`"
            )
        self._check_member(connection, trust, identity, key_digest(public_key))
        return self._issue(connection, trust, trust.issuing, identity, public_key)

    def _check_member(self, connection: sa.Connection, trust: Trust, identity: Identity, digest: bytes) -> None:
        """Raise Unauthenticated for a revoked member. One without a row is of a restored fleet: write the row."""
        is_known = members.is_known(connection, identity)
        if denials.number_of(connection, identity.uri) is not None:
            raise Unauthenticated(
                f"{identity} is revoked and gets no certificate; join as a new member with a token of "
                f"`tandem fleet token --role {identity.role}`"
            )
        if not is_known:
            members.restore(connection, identity, digest, trust.now_ms)

    def _issue(
        self, connection: sa.Connection, trust: Trust, authority: Authority, identity: Identity, public_key: PublicKey
    ) -> Issued:
        key = self._key(authority)
        made = process_certificate(
            authority.certificate, key, identity, public_key, trust.now_ms, self._validity_seconds
        )
        expires_ms = milliseconds(made.not_valid_after_utc)
        bundle = trust.bundle_number
        members.save_certificate(
            connection,
            serial_of(made),
            identity,
            key_digest(public_key),
            authority.number,
            bundle,
            trust.now_ms,
            expires_ms,
        )
        return Issued(identity, made, trust.bundle, bundle, authority.certificate, trust.now_ms)

    # ---------------------------------------------------------------------------------------------- members

    async def members(self) -> list[Member]:
        return await self._transaction(
            lambda connection, now_ms: members.read_all(connection, _read(connection, now_ms).fleet), single=True
        )

    async def revoke(self, identity: Identity) -> int:
        """Deny a member, for good; return the number of the denial. Repeating it changes nothing.

        Raise InvalidRequest for an identity of another fleet.
        """
        number = await self._transaction(partial(self._revoke, identity=identity))
        log.info("member_revoked", role=identity.role, id=identity.id, number=number)
        return number

    def _revoke(self, connection: sa.Connection, now_ms: int, *, identity: Identity) -> int:
        trust = _read(connection, now_ms)
        if identity.fleet != trust.fleet:
            raise InvalidRequest(f"{identity.uri} is of another fleet; this one is {trust.fleet}", field="identity")
        return members.revoke(connection, identity, now_ms, round(self._validity_seconds * 1000))

    async def new_token(self, role: str, seconds: float, uses: int, addresses: tuple[str, ...]) -> JoinToken:
        """Make a join token. Raise InvalidRequest."""
        checked = join_tokens.check(role, seconds, uses)
        make = partial(self._new_token, role=checked, seconds=seconds, uses=uses, addresses=addresses)
        return await self._transaction(make)

    def _new_token(
        self,
        connection: sa.Connection,
        now_ms: int,
        *,
        role: Role,
        seconds: float,
        uses: int,
        addresses: tuple[str, ...],
    ) -> JoinToken:
        trust = _read(connection, now_ms)
        pins = tuple(authority_digest(each.certificate) for each in trust.trusted)
        return join_tokens.add(connection, role, seconds, uses, pins, addresses, now_ms)

    async def clean(self) -> None:
        """Delete rows that nothing can need any more. Call it now and then."""
        await self._transaction(_clean)

    # ---------------------------------------------------------------------------------------------- inside

    def _key(self, authority: Authority) -> PrivateKey:
        assert authority.sealed_key is not None, "only trusted authorities issue, and those have their keys"
        known = self._keys.get(digest := hashlib.sha256(authority.sealed_key).digest())
        if known is None:
            known = self._keys[digest] = unseal(authority.sealed_key, authority.certificate, self._secret)
        return known

    async def _transaction(self, work: Callable[[sa.Connection, int], T], *, single: bool = False) -> T:
        """Run `work` with the database's time, again if another gateway took the same number meanwhile."""
        for _ in range(_TRIES):
            try:
                return await self._database.run(
                    lambda connection: work(connection, self._database.now_ms()), single=single
                )
            except IntegrityError:
                continue
        raise InternalError(f"the database refused a row {_TRIES} times because others wrote the same; try again")


def _read(connection: sa.Connection, now_ms: int, *, locked: bool = False) -> Trust:
    trust = read_trust(connection, now_ms, locked=locked)
    if trust is None:
        raise InvalidRequest("the database has no fleet; start a gateway on it, or use `tandem fleet restore`")
    return trust


def _may_return(connection: sa.Connection, trust: Trust, gateway: Identity) -> bool:
    """Return whether a gateway that starts again may be the member that it was."""
    is_ours = gateway.fleet == trust.fleet and gateway.role == "gateway" and members.is_known(connection, gateway)
    return is_ours and denials.number_of(connection, gateway.uri) is None


def _clean(connection: sa.Connection, now_ms: int) -> None:
    members.delete_old(connection, now_ms)
    denials.delete_old(connection, now_ms)
    join_tokens.delete_old(connection, now_ms)
    authorities.forget_keys_of_left(connection, now_ms)


def _parsed(certificate: bytes) -> x509.Certificate:
    if len(certificate) > MAX_REQUEST_BYTES:
        raise InvalidRequest(
            f"certificate has {len(certificate):,} bytes, at most {MAX_REQUEST_BYTES:,} are read", field="certificate"
        )
    try:
        return x509.load_der_x509_certificate(certificate)
    except ValueError as error:
        raise InvalidRequest(
            "certificate is no certificate; send the present one in DER", field="certificate"
        ) from error


def _check_proof(old: x509.Certificate, certificate_request: bytes, signature: bytes) -> None:
    """Raise Unauthenticated unless the key of `old` signed the request."""
    try:
        _p256_key(old).verify(signature, renewal_proof(certificate_request), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise Unauthenticated(
            "signature is not one by the key of the certificate; sign the request with that key", field="signature"
        ) from error


def _p256_key(certificate: x509.Certificate) -> PublicKey:
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(
            "certificate has a key that cannot be read; send a P-256 one", field="certificate"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest("certificate has a key that is not P-256; this fleet issues no other", field="certificate")
    return key


def _signer_of(old: x509.Certificate, trust: Trust) -> tuple[Authority, Identity]:
    """Return the fleet's authority that signed a certificate, one that has left too, and who the certificate names."""
    for authority in trust.authorities:
        try:
            old.verify_directly_issued_by(authority.certificate)
            identity = identity_in(old)
        except (InvalidSignature, ValueError, TypeError):
            continue
        if identity.fleet == trust.fleet:
            return authority, identity
    raise Unauthenticated(
        "certificate was not issued by this fleet; join it with a token of `tandem fleet token`", field="certificate"
    )


_DAY_MS = 86_400_000
