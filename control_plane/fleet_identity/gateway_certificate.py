"""Keeps one gateway's own certificates valid: the gateway issues them to itself.

A gateway that starts again with its folder is the same member of the fleet, under a new key.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from control_plane.fleet_identity.certificate_authority import CertificateAuthority, Issued
from control_plane.fleet_identity.certificates import milliseconds, new_key
from control_plane.storage.database import Database
from tandem_runtime.certificates.files import CertificateFiles, read_certificate, write_certificate
from tandem_runtime.certificates.names import Identity, identity_in, parse_certificate
from tandem_runtime.certificates.peers import seconds_since_boot
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

CHECK_SECONDS = 1.0


class GatewayCertificate:
    """Two certificates of one identity and one key: for peers, and for the enrolment port.

    They differ while the authority is rotated: the enrolment port shows the one that most processes know. `key` is the
    private key of both, in PEM. Call `open` first.
    """

    def __init__(
        self,
        authority: CertificateAuthority,
        database: Database,
        folder: Path | None = None,
        elapsed: Callable[[], float] = seconds_since_boot,
    ) -> None:
        """`folder`: where the certificate for peers is written, for the next start and for health checks.

        No other process writes it at the same time. `elapsed` gives seconds since some moment, which only go on.
        """
        self._authority = authority
        self._database = database
        self._folder = folder
        self._elapsed = elapsed
        self._renew_at_elapsed = 0.0
        self._written: CertificateFiles | None = None
        self._write_problem = ""
        self._private_key = new_key()
        self.key = self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._peers: Issued | None = None
        self._enrolment: Issued | None = None
        self._is_late = False

    @property
    def peers(self) -> Issued:
        assert self._peers is not None, "open() comes first"
        return self._peers

    @property
    def enrolment(self) -> Issued:
        assert self._enrolment is not None, "open() comes first"
        return self._enrolment

    @property
    def identity(self) -> Identity:
        return self.peers.identity

    @property
    def files(self) -> CertificateFiles:
        """The certificate for peers, also while the disk does not take it."""
        return self._files(self.peers)

    @property
    def version(self) -> int:
        """A number that changes with `files`."""
        return self.peers.certificate.serial_number

    async def open(self) -> None:
        """Be the member that the folder's certificate names, or become a new one. Raise what the authority raises."""
        earlier = await asyncio.to_thread(_identity_in, self._folder) if self._folder is not None else None
        public_key = self._private_key.public_key()
        issued = await self._authority.issue_gateway(public_key, socket.gethostname(), earlier)
        if self._folder is not None:  # first: a new member that is lost with its process is of no use
            self._written = self._files(issued)
            await asyncio.to_thread(write_certificate, self._folder, self._written)
        await self._set(issued)

    async def run(self) -> None:
        """Renew at half of the certificates' life, after a jump of the clock, and with each new trust bundle."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Renew if it is time."""
        try:
            if self._is_due() or (await self._authority.trust()).bundle_number != self.peers.bundle_number:
                again = self._authority.issue_again(self.identity, self._private_key.public_key())
                await self._set(await again)
                log.info("gateway_certificate_renewed", id=self.identity.id)
            self._is_late = False
        except (TandemError, OSError) as error:
            if not self._is_late:
                log.warning("gateway_certificate_not_renewed", id=self.identity.id, error=str(error))
            self._is_late = True
        await self._write_or_wait()

    async def _write_or_wait(self) -> None:
        """Write what `files` are. While the disk takes none, the next `check` tries again."""
        files = self.files
        if self._folder is None or files == self._written:
            return
        try:
            await asyncio.to_thread(write_certificate, self._folder, files)
            self._written, self._write_problem = files, ""
        except OSError as error:
            if str(error) != self._write_problem:
                log.warning("certificate_not_written", folder=str(self._folder), error=str(error), role="gateway")
            self._write_problem = str(error)

    async def _set(self, issued: Issued) -> None:
        trust = await self._authority.trust()
        enrolment = issued
        if trust.oldest.number != trust.issuing.number:
            public_key = self._private_key.public_key()
            enrolment = await self._authority.issue_again(issued.identity, public_key, by_oldest=True)
        self._peers, self._enrolment = issued, enrolment
        life_ms = milliseconds(issued.certificate.not_valid_after_utc) - issued.issued_ms
        self._renew_at_elapsed = self._elapsed() + life_ms / 2 / 1000

    def _files(self, issued: Issued) -> CertificateFiles:
        return CertificateFiles(issued.chain, self.key, issued.bundle)

    def _is_due(self) -> bool:
        if self._elapsed() >= self._renew_at_elapsed:  # the dates may be by a clock that was wrong
            return True
        now_ms = self._database.now_ms()
        return any(_is_due(issued, now_ms) for issued in (self.peers, self.enrolment))


def _identity_in(folder: Path) -> Identity | None:
    """Return who this gateway was when it last ran with this folder; None at the first start."""
    try:
        return identity_in(parse_certificate(read_certificate(folder).certificate))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("certificate_unreadable", folder=str(folder), error=str(error))
        return None


def _is_due(issued: Issued, now_ms: int) -> bool:
    certificate = issued.certificate
    first_ms, last_ms = milliseconds(certificate.not_valid_before_utc), milliseconds(certificate.not_valid_after_utc)
    return now_ms < first_ms or now_ms > (issued.issued_ms + last_ms) / 2
