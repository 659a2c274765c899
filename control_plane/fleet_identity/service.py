"""Creates, runs and closes the parts of a gateway that concern the fleet's identity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from control_plane.fleet_identity.addresses import advertised, local_address
from control_plane.fleet_identity.certificate_authority import VALIDITY_SECONDS, CertificateAuthority, Issued
from control_plane.fleet_identity.denials import DenyListReader
from control_plane.fleet_identity.enrolment import EnrolmentServer
from control_plane.fleet_identity.gateway_certificate import GatewayCertificate
from control_plane.fleet_identity.local_tokens import LocalTokens
from control_plane.storage.database import Database
from tandem.v1 import control_plane_pb2 as cp
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.errors import Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

LOCAL_ROLES: tuple[Role, ...] = ("prefill", "decode", "encode", "kv")
_LOCAL_TOKEN_SECONDS = 86_400.0
_LOCAL_TOKEN_USES = 10_000
_LOCAL_TOKEN_RENEWED_MS = 12 * 3_600_000
_LOCAL_TOKEN_CHECK_SECONDS = 1.0
_CLEAN_SECONDS = 3600.0


@dataclass(frozen=True)
class IdentityOptions:
    """What a gateway's settings say."""

    enrolment_listen: str
    folder: Path
    """For the gateway's certificate; the gateway's own."""
    local_tokens: Path | None = None
    """Folder for join tokens of this machine's processes, which its gateways share; None: they get theirs elsewhere."""
    validity_seconds: float = VALIDITY_SECONDS
    advertise: tuple[str, ...] = ()
    """Where other machines reach the enrolment port; empty: by what it listens on."""


class FleetIdentity:
    """Call `open` after the database was migrated, and `close` at the end."""

    def __init__(self, database: Database, secret: bytes, options: IdentityOptions) -> None:
        self._options = options
        self._database = database
        self.authority = CertificateAuthority(database, secret, options.validity_seconds)
        self.certificate = GatewayCertificate(self.authority, database, options.folder)
        self.deny_list = DenyListReader(database)
        self.enrolment_address = ""
        self.advertised: tuple[str, ...] = ()
        """The addresses for join tokens of other machines."""
        self._server: EnrolmentServer | None = None
        self._local_tokens: LocalTokens | None = None
        self._local_tokens_of = (0, 0)
        """The trust bundle that the local join tokens name, and when they were written."""

    @property
    def identity(self) -> Identity:
        return self.certificate.identity

    @property
    def bundle_number(self) -> int:
        """The number of the trust bundle, for heartbeat replies."""
        issued: Issued = self.certificate.peers
        return issued.bundle_number

    async def open(self) -> None:
        """Join the fleet, or make it, and open the enrolment port. Raise InvalidRequest for another fleet's secret."""
        await self.authority.open()
        await self.certificate.open()
        await self.deny_list.refresh()
        self._server = EnrolmentServer(self._options.enrolment_listen, self.authority, self.certificate)
        self.enrolment_address = await self._server.start()
        self.advertised = advertised(self.enrolment_address, self._options.advertise)
        if (folder := self._options.local_tokens) is not None:
            self._local_tokens = LocalTokens(folder, local_address(self.enrolment_address), self.advertised)
        await self.renew_local_tokens()

    def denied_since(self, number: int) -> cp.DenyList:
        """Return what a process lacks of the deny list that has read up to `number`; for heartbeat replies."""
        return self.deny_list.since(number)

    def new_member(self, plaintext_until: float = 0.0) -> FleetMember:
        """Return this gateway as a member, which follows its certificate and the deny list. Call after `open`."""
        certificate = ProcessCertificate(lambda: self.certificate.files, lambda: self.certificate.version)
        member = FleetMember(certificate, plaintext_until=plaintext_until)

        def follow() -> None:
            news = self.denied_since(member.denied.number)
            member.denied.apply(news.number, news.ids)

        follow()
        self.deny_list.listen(follow)
        return member

    @property
    def is_revoked(self) -> bool:
        """Whether this gateway is on the deny list: nobody answers it any more. Started again, it is a new member."""
        return self.deny_list.has(self.identity)

    def when_revoked(self, on_revoked: Callable[[], None]) -> None:
        """Call `on_revoked` on the event loop when this gateway is revoked; at once if it is."""

        def look() -> None:
            if self.is_revoked:
                log.error("gateway_revoked", id=self.identity.id, remedy="start it again: it becomes a new member")
                on_revoked()

        look()
        self.deny_list.listen(look)

    @property
    def loops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What runs in the background until it is cancelled, by name."""
        return {
            "gateway-certificate": self.certificate.run,
            "deny-list": self.deny_list.run,
            "local-join-tokens": self._renew_local_tokens,
            "fleet-clean": self._clean,
        }

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(1.0)

    async def _renew_local_tokens(self) -> None:
        """Write new tokens every 12 hours, after a jump of the clock, and when the authorities change.

        Each second this gateway also adds its addresses to the tokens that another gateway has written.
        """
        is_behind = False
        while True:
            await asyncio.sleep(_LOCAL_TOKEN_CHECK_SECONDS)
            try:
                await self.renew_local_tokens()
                is_behind = False
            except (Unavailable, OSError) as error:
                if not is_behind:
                    log.warning("local_join_tokens_not_renewed", error=str(error))
                is_behind = True

    async def renew_local_tokens(self) -> None:
        """Write what the join tokens of this machine's processes lack. Raise Unavailable, OSError."""
        if self._local_tokens is None:
            return
        bundle_number, written_ms = self._local_tokens_of
        is_recent = 0 <= self._database.now_ms() - written_ms < _LOCAL_TOKEN_RENEWED_MS
        if is_recent and bundle_number == self.bundle_number:
            await asyncio.to_thread(self._local_tokens.add_ours)
            return
        written = self.bundle_number, self._database.now_ms()
        tokens = {role: await self._new_local_token(role) for role in LOCAL_ROLES}
        await asyncio.to_thread(self._local_tokens.write, tokens)
        self._local_tokens_of = written

    async def _new_local_token(self, role: Role) -> JoinToken:
        addresses = (local_address(self.enrolment_address),)
        return await self.authority.new_token(role, _LOCAL_TOKEN_SECONDS, _LOCAL_TOKEN_USES, addresses)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(_CLEAN_SECONDS)
            try:
                await self.authority.clean()
            except Unavailable as error:
                log.warning("fleet_not_cleaned", error=error.message)
