"""Gets a process its certificate: joins a fleet with a token, or renews a certificate.

Both calls open the enrolment port twice. The first connection trusts nobody and reads the server's certificates. The
second one sends something only if the server is a gateway whose authority the token names, or the trusted bundle holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tandem.v1 import enrolment_pb2 as pb
from tandem.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from tandem_runtime.calls import TracedChannel
from tandem_runtime.certificates.files import CertificateFiles
from tandem_runtime.certificates.names import Identity, Role, identity_in, role_dns_name
from tandem_runtime.channel import call_error
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.enrolment.renewal_proof import renewal_proof
from tandem_runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.server import split_address

log = get_logger(__name__)

_CALL_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_MAX_REPLY_BYTES = 64 * 1024
_MAX_CHAIN_CERTIFICATES = 4


@dataclass(frozen=True)
class Enrolled:
    """A new certificate with its key, and what to trust."""

    identity: Identity
    files: CertificateFiles
    bundle_number: int


class Refused(Unauthenticated):
    """A gateway of the fleet gives this process no certificate any more: it is revoked, or away for too long."""


class _WrongServer(Unauthenticated):
    """What answers at an address is no gateway of the fleet. Another of the addresses may lead to one."""


async def join(token: JoinToken, role: Role, *, host: str = "", seconds: float = 60.0) -> Enrolled:
    """Join the fleet of a token as `role`, and try for `seconds` while no gateway answers.

    Raise Unauthenticated if the fleet refuses the token, or if no server at its addresses is of the token's fleet.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    request = _certificate_request(key)

    async def attempt(address: str) -> Enrolled:
        server = await _find_server(address, lambda certificate: authority_pin(certificate) in token.authorities)
        message = pb.EnrolRequest(token=token.credential, role=role, certificate_request=request, host=host)
        async with _channel(address, server) as channel:
            reply = await EnrolmentServiceStub(channel).Enrol(message, timeout=_CALL_SECONDS)
        enrolled = _checked(reply, key)
        if enrolled.identity.role != role or enrolled.identity.fleet != server.identity.fleet:
            raise Unauthenticated(f"the fleet answered with a certificate for {enrolled.identity}, not for role {role}")
        return enrolled

    return await _from_any(token.addresses, attempt, seconds)


async def renew(
    addresses: Sequence[str], files: CertificateFiles, *, authorities: Sequence[bytes] = (), seconds: float = 60.0
) -> Enrolled:
    """Replace a certificate and its key, also one that has expired lately; try for `seconds` while no gateway answers.

    `authorities`: those that a join token names are trusted beside the bundle's.
    Raise Refused if the certificate is revoked, or too old; Unauthenticated if another fleet's server answers.
    """
    old = x509.load_pem_x509_certificate(files.certificate)
    old_key = serialization.load_pem_private_key(files.key, password=None)
    if not isinstance(old_key, ec.EllipticCurvePrivateKey):
        raise InvalidRequest(
            "the certificate's key is not P-256, so this fleet did not issue it; renew it at its issuer"
        )
    identity = identity_in(old)
    trusted = {*authorities, *map(authority_pin, x509.load_pem_x509_certificates(files.bundle))}
    key = ec.generate_private_key(ec.SECP256R1())
    request = _certificate_request(key)
    message = pb.RenewCertificateRequest(
        certificate=_der(old),
        certificate_request=request,
        signature=old_key.sign(renewal_proof(request), ec.ECDSA(hashes.SHA256())),
    )

    async def attempt(address: str) -> Enrolled:
        server = await _find_server(address, lambda certificate: authority_pin(certificate) in trusted)
        if server.identity.fleet != identity.fleet:
            raise Unauthenticated(
                f"the server at {address} is of fleet {server.identity.fleet}, and this process is {identity} of fleet "
                f"{identity.fleet}; join that fleet with a token of `tandem fleet token --role {identity.role}`"
            )
        async with _channel(address, server) as channel:
            try:
                reply = await EnrolmentServiceStub(channel).Renew(message, timeout=_CALL_SECONDS)
            except Unauthenticated as error:
                raise Refused(error.message, field=error.field) from error
        renewed = _checked(reply, key)
        if renewed.identity != identity:
            raise Unauthenticated(f"the fleet answered {identity} with a certificate for {renewed.identity}")
        return renewed

    return await _from_any(addresses, attempt, seconds)


async def _from_any(
    addresses: Sequence[str], attempt: Callable[[str], Any], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Enrolled:
    """Try each address in turn, and again with growing pauses, until one answers or `seconds` have passed."""
    deadline, pause, problems = clock() + seconds, _FIRST_PAUSE_SECONDS, dict.fromkeys(addresses, "")
    while True:
        wrong: set[str] = set()
        for address in random.sample(list(addresses), len(addresses)):
            try:
                enrolled: Enrolled = await attempt(address)
            except (Unavailable, DeadlineExceeded, Overloaded) as error:
                problems[address] = error.message
            except _WrongServer as error:
                problems[address] = error.message
                wrong.add(address)
                if wrong == set(addresses):
                    raise
            else:
                log.info("certificate_received", role=enrolled.identity.role, id=enrolled.identity.id, address=address)
                return enrolled
        if clock() + pause > deadline:
            told = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
            raise Unavailable(
                f"no certificate after {seconds:g} s: {told}; is a gateway running, with --enrolment-listen, at an "
                "address that this machine reaches?"
            )
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


# ------------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class _Server:
    identity: Identity
    authority: x509.Certificate


async def _find_server(address: str, is_trusted: Callable[[x509.Certificate], bool]) -> _Server:
    """Return the server's identity and its trusted authority. Raise Unavailable; _WrongServer for another one."""
    leaf, *others = await _chain_of(address)
    authority = next((each for each in others if is_trusted(each)), None)
    if authority is None:
        raise _WrongServer(
            f"the server at {address} has no certificate of an authority that is expected; either the address is "
            "another fleet's or an attacker's, or the authority was replaced: make a new token with "
            "`tandem fleet token` on the gateway's machine"
        )
    try:
        leaf.verify_directly_issued_by(authority)
        identity = identity_in(leaf)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise _WrongServer(f"the certificate of the server at {address} is not by its authority: {error}") from error
    if identity.role != "gateway":
        raise _WrongServer(f"the server at {address} is {identity}, and only a gateway may admit processes")
    _check_clock(leaf, f"the certificate of the server at {address}")
    return _Server(identity, authority)


def _check_clock(certificate: x509.Certificate, name: str) -> None:
    now = datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        raise Unavailable(
            f"it is {now:%Y-%m-%d %H:%M} UTC here, and {name} is valid from {first:%Y-%m-%d %H:%M} to "
            f"{last:%Y-%m-%d %H:%M}; set the clocks"
        )


async def _chain_of(address: str) -> list[x509.Certificate]:
    """Return the certificates that a server presents, its own first. Nothing about them is verified."""
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), port, ssl=context)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"cannot connect to {address}: {error or 'no answer'}") from error
    try:
        presented = _unverified_chain(writer.get_extra_info("ssl_object"))[:_MAX_CHAIN_CERTIFICATES]
        return [x509.load_der_x509_certificate(each) for each in presented]
    except ValueError as error:
        raise _WrongServer(f"the server at {address} presents what is no certificate: {error}") from error
    finally:
        writer.transport.abort()


def _unverified_chain(connection: Any) -> list[bytes]:
    """Return the presented certificates in DER: a public method since Python 3.13, the same one inside before."""
    if hasattr(connection, "get_unverified_chain"):
        return list(connection.get_unverified_chain() or ())
    chain = connection._sslobj.get_unverified_chain() or ()
    return [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in chain]


def _channel(address: str, server: _Server) -> grpc.aio.Channel:
    """Return a channel that only a gateway of the server's fleet can answer."""
    credentials = grpc.ssl_channel_credentials(server.authority.public_bytes(serialization.Encoding.PEM))
    options = [
        ("grpc.ssl_target_name_override", role_dns_name(server.identity.fleet, "gateway")),
        ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    return TracedChannel(grpc.aio.secure_channel(address, credentials, options=options), call_error)


# ------------------------------------------------------------------------------------------------- the answer


def _checked(reply: pb.EnrolReply, key: ec.EllipticCurvePrivateKey) -> Enrolled:
    """Return the reply's certificate with its key. Raise Unauthenticated if the two or the bundle do not fit.

    Raise Unavailable for a certificate that is not valid by our clock: it would replace one that is.
    """
    try:
        certificate = x509.load_pem_x509_certificate(reply.certificate)
        bundle = x509.load_pem_x509_certificates(reply.bundle)
        identity = identity_in(certificate)
    except ValueError as error:
        raise Unauthenticated(f"the fleet answered with what is no certificate: {error}") from error
    if certificate.public_key() != key.public_key():
        raise Unauthenticated("the fleet answered with a certificate for another key")
    if not any(_is_by(certificate, authority) for authority in bundle):
        raise Unauthenticated("the fleet answered with a certificate that its own trust bundle does not verify")
    _check_clock(certificate, "the certificate that the fleet issued")
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Enrolled(identity, CertificateFiles(reply.certificate, private, reply.bundle), reply.bundle_number)


def _is_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _certificate_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def authority_pin(certificate: x509.Certificate) -> bytes:
    """Return what join tokens name an authority by: the SHA-256 of its public key."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(certificate.public_key().public_bytes(serialization.Encoding.DER, form)).digest()


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)
