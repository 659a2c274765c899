"""Makes the certificates of a test: an authority of its own, and members of its fleet."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import CertificateFiles, write_certificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role


def new_id() -> str:
    return secrets.token_hex(8)


class Authority:
    """A certificate authority of one fleet."""

    def __init__(self, fleet: str = "") -> None:
        self.fleet = fleet or new_id()
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {new_id()}")])
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=10))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def bundle(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def identity(self, role: Role, id: str = "") -> Identity:
        return Identity(self.fleet, role, id or new_id())

    def issue(
        self,
        identity: Identity,
        seconds: float = 3600.0,
        *,
        bundle: bytes = b"",
        uris: Sequence[str] | None = None,
        dns_names: Sequence[str] | None = None,
    ) -> CertificateFiles:
        """Return the files of a new key and certificate, valid for `seconds` from now; negative: expired since then."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        uris = [identity.uri] if uris is None else uris
        dns_names = identity.dns_names if dns_names is None else dns_names
        names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns_names)]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(seconds=seconds))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return CertificateFiles(
            certificate.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            bundle or self.bundle,
        )

    def member(
        self, folder: Path, role: Role, id: str = "", seconds: float = 3600.0, plaintext_until: float = 0.0
    ) -> FleetMember:
        """Return a member with a new certificate in a folder of its own; `renew` writes the next one there."""
        identity = self.identity(role, id)
        write_certificate(folder / identity.id, self.issue(identity, seconds))
        certificate = ProcessCertificate.in_folder(folder / identity.id)
        return FleetMember(certificate, plaintext_until=plaintext_until)

    def renew(self, folder: Path, member: FleetMember, seconds: float = 3600.0, bundle: bytes = b"") -> int:
        """Give `member` a new certificate and let it read it; return the serial number."""
        write_certificate(folder / member.identity.id, self.issue(member.identity, seconds, bundle=bundle))
        assert member.certificate.refresh()
        return member.certificate.current.serial
