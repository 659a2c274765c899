"""Makes the callers that a fleet must refuse, and members of each role that it must refuse somewhere."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from control_plane.fleet_identity.certificate_authority import CertificateAuthority, Issued
from control_plane.fleet_identity.certificates import PrivateKey, new_key, pem, process_certificate
from control_plane.fleet_identity.sealed_key import unseal
from control_plane.secrets import load_secret
from control_plane.storage.database import Database, database_url
from tandem_runtime.calls import TracedChannel
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import CertificateFiles, write_certificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role
from tandem_runtime.channel import call_error, open_channel
from tandem_runtime.enrolment import client
from tests.certificates import Authority, new_id
from tests.system.fleet import Fleet, until


@dataclass(frozen=True)
class Caller:
    """Who calls: a member with a certificate; with TLS and none; in plain text."""

    name: str
    member: FleetMember | None = None
    bundle: bytes = b""

    def channel(self, address: str, server: Identity) -> grpc.aio.Channel:
        if self.member is not None or not self.bundle:
            return open_channel(address, self.member, server)
        credentials = grpc.ssl_channel_credentials(self.bundle)
        options = (("grpc.ssl_target_name_override", server.dns_name), ("grpc.use_local_subchannel_pool", 1))
        return TracedChannel(grpc.aio.secure_channel(address, credentials, options=options), call_error)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the context for a data connection; None: in plain text."""
        if self.member is not None:
            return self.member.certificate.ssl_context(False)
        if not self.bundle:
            return None
        return ssl.create_default_context(cadata=self.bundle.decode("ascii"))


class Callers:
    """Makes callers against the authority of a running fleet, whose state directory is `state_dir`."""

    def __init__(self, fleet: Fleet, folder: Path, state_dir: Path) -> None:
        self._fleet = fleet
        self._folder = folder
        self._authority = fleet.identity.authority
        self._database = database_url("", state_dir)
        self._secret = load_secret("", state_dir)

    async def member(self, role: Role) -> FleetMember:
        """Return a new member of the fleet, as it joins: by token, or by the secret if it is a gateway."""
        if role == "gateway":
            key = new_key()
            issued = await self._authority.issue_gateway(key.public_key(), "a host")
            return self._member(issued.identity, _files(issued, key))
        token = await self._authority.new_token(role, 60, 1, (self._fleet.identity.enrolment_address,))
        enrolled = await client.join(token, role)
        return self._member(enrolled.identity, enrolled.files)

    async def strangers(self) -> list[Caller]:
        """Return everybody whom no server of the fleet may answer; the last one is a member until it is revoked."""
        bundle = (await self._authority.trust()).bundle
        of_another_fleet = Authority(self._fleet.identity.identity.fleet)  # the same name, another key
        another = of_another_fleet.identity("gateway")
        return [
            Caller("plain text"),
            Caller("no certificate", bundle=bundle),
            Caller("other authority", self._member(another, of_another_fleet.issue(another, bundle=bundle))),
            Caller("other fleet", await self._of_another_fleet()),
            Caller("expired", await self._expired()),
            Caller("revoked", await self.member("gateway")),
        ]

    async def _of_another_fleet(self) -> FleetMember:
        """Return a gateway of another fleet whose certificate this fleet's authority has signed."""
        trust = await self._authority.trust()
        issuing, key = trust.issuing, new_key()
        assert issuing.sealed_key is not None, "it issues"
        identity = Identity(new_id(), "gateway", new_id())
        private = unseal(issuing.sealed_key, issuing.certificate, self._secret)
        made = process_certificate(issuing.certificate, private, identity, key.public_key(), trust.now_ms, 3600.0)
        return self._member(identity, CertificateFiles(pem(made), _private(key), trust.bundle))

    async def _expired(self) -> FleetMember:
        """Return a gateway of this fleet whose certificate was valid for a second."""
        database = Database(self._database)
        try:
            key = new_key()
            authority = CertificateAuthority(database, self._secret, validity_seconds=1.0)
            issued = await authority.issue_gateway(key.public_key(), "a host")
        finally:
            await database.close()
        member = self._member(issued.identity, _files(issued, key))
        await until(lambda: time.time() > member.certificate.current.expires_at, 5)
        return member

    def _member(self, identity: Identity, files: CertificateFiles) -> FleetMember:
        write_certificate(self._folder / identity.id, files)
        return FleetMember(ProcessCertificate.in_folder(self._folder / identity.id))


def _files(issued: Issued, key: PrivateKey) -> CertificateFiles:
    return CertificateFiles(issued.chain, _private(key), issued.bundle)


def _private(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
