"""Makes the certificates of authorities and of processes (RFC 5280). Pure: no database and no clock of its own.

Keys are P-256: grpcio's BoringSSL offers no Ed25519 to peers by default.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem_runtime.certificates.names import METRICS_NAME, Identity
from tandem_runtime.enrolment.keeper import EARLIER_SECONDS
from tandem_runtime.errors import InvalidRequest

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

MAX_REQUEST_BYTES = 8192
"""Of a certificate request or a certificate that a process sends; one of ours has about 500."""

EARLIER = timedelta(seconds=EARLIER_SECONDS)
"""A certificate is valid from so long before its issue, for processes whose clocks are behind."""

_AUTHORITY_VALIDITY = timedelta(days=3650)
_AUTHORITY_EARLIER = timedelta(days=1)


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def authority_certificate(key: PrivateKey, fleet: str, number: int, now_ms: int) -> x509.Certificate:
    """Return the self-signed certificate of a fleet's authority. It may sign processes, not other authorities."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tandem fleet {fleet} authority {number}")])
    now = _moment(now_ms)
    usage = _key_usage(is_authority=True)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _AUTHORITY_EARLIER)
        .not_valid_after(now + _AUTHORITY_VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def process_certificate(
    authority: x509.Certificate,
    authority_key: PrivateKey,
    identity: Identity,
    public_key: PublicKey,
    now_ms: int,
    validity_seconds: float,
) -> x509.Certificate:
    """Return a process's certificate: one URI SAN with its identity, DNS SANs for clients, for both sides of TLS."""
    now = _moment(now_ms)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    names += [x509.DNSName(name) for name in (*identity.dns_names, METRICS_NAME)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    key_of_authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity))]))
        .issuer_name(authority.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(min(now + timedelta(seconds=validity_seconds), authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(key_of_authority, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def requested_key(request: bytes) -> PublicKey:
    """Return the public key of a certificate request (PKCS#10, DER), whose sender has proved the private one.

    Names and extensions that the request asks for are ignored. Raise InvalidRequest.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise InvalidRequest(
            f"certificate_request has {len(request):,} bytes, at most {MAX_REQUEST_BYTES:,} are read",
            field="certificate_request",
        )
    try:
        parsed = x509.load_der_x509_csr(request)
        key, is_proved = parsed.public_key(), parsed.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature, TypeError) as error:
        raise InvalidRequest(
            "certificate_request is no certificate request; send PKCS#10 in DER", field="certificate_request"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest("certificate_request has a key that is not P-256; make one", field="certificate_request")
    if not is_proved:
        raise InvalidRequest(
            "certificate_request is not signed with its own key; sign it again", field="certificate_request"
        )
    return key


def key_digest(key: PublicKey) -> bytes:
    """Return the SHA-256 of a public key (SubjectPublicKeyInfo, DER)."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def authority_digest(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of an authority's public key, by which a join token names it."""
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "this module makes P-256 keys only"
    return key_digest(key)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def serial_of(certificate: x509.Certificate) -> str:
    """Return the serial number as it is stored: hex digits."""
    return f"{certificate.serial_number:x}"


def milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _moment(now_ms: int) -> datetime:
    return datetime.fromtimestamp(now_ms // 1000, UTC)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
