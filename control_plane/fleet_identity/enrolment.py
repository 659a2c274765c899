"""Serves enrolment on a TLS port of its own, where callers have no certificate.

With client certificates optional, grpcio asks for none, so a port is either for peers with names or for peers without.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from control_plane.fleet_identity.attempts import Attempts, address_of
from control_plane.fleet_identity.certificate_authority import CertificateAuthority, Issued
from control_plane.fleet_identity.certificates import MAX_REQUEST_BYTES, pem
from control_plane.fleet_identity.gateway_certificate import GatewayCertificate
from tandem.v1 import enrolment_pb2 as pb
from tandem.v1 import enrolment_pb2_grpc
from tandem_runtime.certificates.server_port import renewed_port_credentials
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.interceptors import ErrorInterceptor
from tandem_runtime.log import get_logger
from tandem_runtime.server import split_address

log = get_logger(__name__)

_MAX_CALLS_AT_ONCE = 64
_MAX_TOKEN_CHARACTERS = 128
_MAX_ROLE_CHARACTERS = 16
_MAX_HOST_CHARACTERS = 256
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 32 * 1024),
    ("grpc.max_send_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """tandem.v1.EnrolmentService."""

    def __init__(self, authority: CertificateAuthority, attempts: Attempts | None = None) -> None:
        self._authority = authority
        self._attempts = attempts or Attempts()

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolReply:
        for name, limit in (
            ("token", _MAX_TOKEN_CHARACTERS),
            ("role", _MAX_ROLE_CHARACTERS),
            ("host", _MAX_HOST_CHARACTERS),
        ):
            if len(value := getattr(request, name)) > limit:
                raise InvalidRequest(f"{name} has {len(value):,} characters, the limit is {limit}", field=name)

        async def enrol() -> Issued:
            return await self._authority.enrol(request.token, request.role, request.certificate_request, request.host)

        issued = await self._attempt(context, enrol)
        log.info("member_joined", role=issued.identity.role, id=issued.identity.id)
        return _reply(issued)

    async def Renew(self, request: pb.RenewCertificateRequest, context: Any) -> pb.EnrolReply:
        if len(request.signature) > MAX_REQUEST_BYTES:
            raise InvalidRequest(f"signature has {len(request.signature):,} bytes, the limit is {MAX_REQUEST_BYTES:,}")

        async def renew() -> Issued:
            return await self._authority.renew(request.certificate, request.certificate_request, request.signature)

        issued = await self._attempt(context, renew)
        log.info("member_renewed", role=issued.identity.role, id=issued.identity.id)
        return _reply(issued)

    async def _attempt(self, context: Any, call: Callable[[], Awaitable[Issued]]) -> Issued:
        address = address_of(context.peer())
        self._attempts.start(address)
        try:
            return await call()
        except InvalidRequest as error:  # a wrong token or certificate is one too
            self._attempts.failed(address)
            log.warning("enrolment_refused", address=address, kind=type(error).__name__, field=error.field)
            raise


class EnrolmentServer:
    """The port. Its certificate is the gateway's, and changes without a restart."""

    def __init__(self, listen: str, authority: CertificateAuthority, certificate: GatewayCertificate) -> None:
        self._listen = listen
        self._certificate = certificate
        self._presented = certificate.enrolment
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS_AT_ONCE
        )
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(EnrolmentService(authority), self._server)

    async def start(self) -> str:
        """Listen and return the real host:port. Raise InvalidRequest where the port is taken."""
        host, _ = split_address(self._listen)
        credentials = renewed_port_credentials(
            self._configuration(), self._changed_configuration, require_client_authentication=False
        )
        try:
            bound = self._server.add_secure_port(self._listen, credentials)
        except RuntimeError as error:
            raise InvalidRequest(
                f"cannot listen on {self._listen} for enrolment: {error}; is the port taken? choose another one with "
                "--enrolment-listen"
            ) from error
        await self._server.start()
        return f"{host}:{bound}"

    async def stop(self, grace_seconds: float | None = None) -> None:
        await self._server.stop(grace_seconds)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self._presented = presented = self._certificate.enrolment
        return grpc.ssl_server_certificate_configuration([(self._certificate.key, presented.chain)])

    def _changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificate if it has changed."""
        return None if self._certificate.enrolment is self._presented else self._configuration()


def _reply(issued: Issued) -> pb.EnrolReply:
    return pb.EnrolReply(
        certificate=pem(issued.certificate),
        bundle=issued.bundle,
        identity=issued.identity.uri,
        bundle_number=issued.bundle_number,
    )
