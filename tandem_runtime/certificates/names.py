"""Names a process of the fleet: its fleet, role and id, as they stand in its certificate.

A certificate has exactly one URI SAN and three DNS SANs:

    URI  spiffe://<fleet>/<role>/<id>        who the process is; servers and handlers read this one only
    DNS  <id>.<role>.tandem.internal         what a client expects that knows the id
    DNS  <role>.<fleet>.tandem.internal      what a client expects that knows the role only (a gateway's address in the
                                             settings)
    DNS  metrics.tandem.internal             what Prometheus expects, which has one name for all processes of a job; no
                                             process of the fleet dials with this name

TLS libraries compare DNS names in the handshake, never URIs. So a client dials with the DNS name that it expects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from cryptography import x509

Role = Literal["gateway", "prefill", "decode", "kv", "encode", "supervisor"]

ROLES: tuple[Role, ...] = get_args(Role)

DOMAIN = "tandem.internal"

METRICS_NAME = f"metrics.{DOMAIN}"
"""The DNS SAN of every certificate of Tandem's own authority. Certificates of others do without."""

_URI = re.compile(r"spiffe://([0-9a-f]{16})/([a-z]{1,16})/([0-9a-f]{16})", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class Identity:
    """A process of a fleet. The certificate authority makes `fleet` and `id`: 16 hex digits each."""

    fleet: str
    role: Role
    id: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role[:32]!r} is unknown; the roles are {', '.join(ROLES)}")
        for name, value in (("fleet", self.fleet), ("id", self.id)):
            if not _HEX.fullmatch(value):
                raise ValueError(f"{name} {value[:32]!r} of an identity is not 16 hex digits in lower case")

    @property
    def uri(self) -> str:
        return f"spiffe://{self.fleet}/{self.role}/{self.id}"

    @property
    def dns_name(self) -> str:
        return f"{self.id}.{self.role}.{DOMAIN}"

    @property
    def role_dns_name(self) -> str:
        return role_dns_name(self.fleet, self.role)

    @property
    def dns_names(self) -> tuple[str, str]:
        """The DNS SANs of this identity's certificate."""
        return self.dns_name, self.role_dns_name

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Return the identity of a URI SAN; raises ValueError for any other form than `uri` makes."""
        match = _URI.fullmatch(uri) if len(uri) <= _MAX_URI_CHARACTERS else None
        if match is None:
            raise ValueError(
                f"{uri[:_MAX_URI_CHARACTERS]!r} is not the name of a process; "
                "the form is spiffe://<fleet>/<role>/<id>, fleet and id of 16 hex digits"
            )
        return cls(match[1], cast(Role, match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


_MAX_URI_CHARACTERS = len("spiffe://") + 16 + 1 + max(map(len, ROLES)) + 1 + 16


def is_id(text: str) -> bool:
    """Return whether `text` has the form of the ids in certificates, which no process without one may take."""
    return _HEX.fullmatch(text) is not None


def role_dns_name(fleet: str, role: Role) -> str:
    """Return the DNS SAN that all certificates of one role have."""
    return f"{role}.{fleet}.{DOMAIN}"


def identity_of(certificate: bytes) -> Identity:
    """Return the identity in a certificate (PEM or DER); raises ValueError unless it has exactly one URI SAN."""
    return identity_in(parse_certificate(certificate))


def identity_in(certificate: x509.Certificate) -> Identity:
    """Return the identity in a parsed certificate; raises ValueError unless it has exactly one URI SAN."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise ValueError("the certificate has no subject alternative name; it must have one URI SAN") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError(f"the certificate has {len(uris)} URI SANs; it must have exactly one")
    return Identity.parse(uris[0])


def parse_certificate(certificate: bytes) -> x509.Certificate:
    """Return the first certificate of `certificate` (PEM or DER); raises ValueError."""
    if certificate.lstrip().startswith(b"-----BEGIN"):
        return x509.load_pem_x509_certificate(certificate)
    return x509.load_der_x509_certificate(certificate)
