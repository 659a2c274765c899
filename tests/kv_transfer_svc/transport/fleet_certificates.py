"""A certificate authority for tests of data connections, and the memberships that it gives out."""

from __future__ import annotations

import datetime
import secrets
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kv_transfer_svc.transport.link_tls import LinkTls
from tandem_runtime.certificates.names import Identity, Role, identity_of
from tandem_runtime.errors import TandemError, Unauthenticated, Unavailable


@dataclass
class Admitted:
    identity: Identity


class Opened:
    def __init__(self, owner: Peers, identity: Identity, close: Callable[[TandemError], None]) -> None:
        self.identity = identity
        self.close = close
        self._owner = owner

    def end(self) -> None:
        self._owner.open.remove(self)


@dataclass
class Peers:
    """What one process has open, by identity; and whom it admits."""

    fleet: str
    denied: set[Identity] = field(default_factory=set)
    open: list[Opened] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    """Of the certificates seen, in order."""

    def admit(self, certificate: bytes | None) -> Admitted:
        assert certificate is not None, "TLS asks for one"
        identity = identity_of(certificate)
        self.serials.append(x509.load_der_x509_certificate(certificate).serial_number)
        if identity.fleet != self.fleet or identity in self.denied:
            raise Unauthenticated(f"{identity} is not admitted")
        return Admitted(identity)

    def accepted(self, identity: Identity, close: Callable[[TandemError], None]) -> Opened:
        opened = Opened(self, identity, close)
        self.open.append(opened)
        return opened

    dialled = accepted

    def revoke(self, identity: Identity) -> None:
        """Deny an identity and close what it has open, as the deny list does."""
        self.denied.add(identity)
        for opened in [each for each in self.open if each.identity == identity]:
            opened.close(Unavailable(f"{identity} is revoked"))


@dataclass
class Member:
    """A process of the fleet: `tls.ssl_context` uses the newest certificate."""

    authority: Authority
    identity: Identity
    peers: Peers
    seconds: float = 3600.0
    plaintext_until: float = 0.0

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._pem = self.authority.issue(self.identity, self.seconds)

    @property
    def tls(self) -> LinkTls:
        return LinkTls(self.identity, self.context, self.peers, self.plaintext_until)

    def context(self, server_side: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.check_hostname = not server_side
        context.load_verify_locations(cadata=self.authority.certificate.public_bytes(Encoding.PEM).decode())
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(self._pem)
            context.load_cert_chain(file.name)
        return context


class Authority:
    """The authority of one fleet."""

    def __init__(self, fleet: str = "", key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.fleet = fleet or secrets.token_hex(8)
        self._key = key or ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {self.fleet}")])
        self.certificate = self._signed(name, name, self._key, x509.BasicConstraints(True, 0), None, 3600.0)

    @classmethod
    def of(cls, seed: bytes) -> Authority:
        """Return the authority of a seed of 32 bytes: the same key, name and fleet in every process."""
        return cls(seed[:8].hex(), ec.derive_private_key(int.from_bytes(seed[:31], "big") or 1, ec.SECP256R1()))

    def member(self, role: Role = "kv", *, seconds: float = 3600.0, plaintext_until: float = 0.0) -> Member:
        identity = Identity(self.fleet, role, secrets.token_hex(8))
        return Member(self, identity, Peers(self.fleet), seconds, plaintext_until)

    def issue(self, identity: Identity, seconds: float) -> bytes:
        """Return a new key and its certificate as PEM; negative seconds: expired since then."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(identity.uri), *map(x509.DNSName, identity.dns_names)]
        leaf = self._signed(
            x509.Name([]),
            self.certificate.subject,
            key,
            x509.BasicConstraints(False, None),
            x509.SubjectAlternativeName(names),
            seconds,
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + leaf.public_bytes(Encoding.PEM)

    def _signed(
        self,
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        names: x509.SubjectAlternativeName | None,
        seconds: float,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(seconds=seconds))
            .add_extension(constraints, critical=True)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=True)
        return builder.sign(self._key, hashes.SHA256())
