"""One gateway's authority for tests, with a clock that can be moved."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.fleet_identity.certificate_authority import CertificateAuthority, Issued
from control_plane.fleet_identity.certificates import pem
from control_plane.storage.database import Database
from tandem_runtime.certificates.files import CertificateFiles
from tandem_runtime.enrolment.renewal_proof import renewal_proof

on_both = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
"""For tests of what the two databases do differently: locks, conflicts, types."""

SECRET = b"\x07" * 32
ADDRESSES = ("127.0.0.1:1",)


@dataclass
class World:
    database: Database
    authority: CertificateAuthority

    def pass_hours(self, hours: float) -> None:
        """Move the clock of the database."""
        self.database._offset_seconds += hours * 3600

    async def credential(self, role: str = "decode", seconds: float = 3600, uses: int = 1) -> str:
        return (await self.authority.new_token(role, seconds, uses, ADDRESSES)).credential

    async def join(self, key: ec.EllipticCurvePrivateKey | None = None, role: str = "decode") -> Issued:
        return await self.authority.enrol(await self.credential(role), role, request_of(key or new_key()), "a host")

    async def renew(
        self, issued: Issued, key: ec.EllipticCurvePrivateKey, new: ec.EllipticCurvePrivateKey | None = None
    ) -> Issued:
        request = request_of(new or new_key())
        return await self.authority.renew(der(issued.certificate), request, proof(key, request))


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def request_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def proof(key: ec.EllipticCurvePrivateKey, request: bytes) -> bytes:
    return key.sign(renewal_proof(request), ec.ECDSA(hashes.SHA256()))


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def files_of(issued: Issued, key: ec.EllipticCurvePrivateKey) -> CertificateFiles:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return CertificateFiles(pem(issued.certificate), private, issued.bundle)
