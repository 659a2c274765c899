"""Gets a process its certificate when it starts, and keeps it valid while it runs.

The folder holds the three files of `tandem_runtime.certificates.files`, and `enrolment.json`: where to renew. A process
that starts again with its folder keeps its identity; without it, it joins with its token as a new member. A renewed
certificate is used at once, and written as soon as the disk takes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from tandem_runtime.certificates.files import CertificateFiles, read_certificate, write_certificate
from tandem_runtime.certificates.names import Identity, Role, identity_in
from tandem_runtime.certificates.peers import seconds_since_boot
from tandem_runtime.enrolment import client
from tandem_runtime.enrolment.client import Enrolled, Refused
from tandem_runtime.enrolment.join_token import MAX_ADDRESSES, JoinToken
from tandem_runtime.errors import InvalidRequest, TandemError, Unauthenticated, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

EARLIER_SECONDS = 7200.0
"""A certificate is valid from so long before its issue."""
CHECK_SECONDS = 1.0
_TRY_SECONDS = 10.0
_TRY_SECONDS_WITH_FILE = 2.0
_REFUSED_PAUSE_SECONDS = 30.0
_FILE_POLL_SECONDS = 0.05
_ENROLMENT = "enrolment.json"


class CertificateKeeper:
    """Owned by the process's main coroutine: `open`, then `run` as a task."""

    def __init__(
        self,
        folder: Path,
        role: Role,
        *,
        host: str = "",
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = seconds_since_boot,
    ) -> None:
        """`clock` gives Unix seconds; `elapsed` seconds since some moment, which only go on."""
        self._folder = folder
        self._role: Role = role
        self._host = host
        self._clock = clock
        self._elapsed = elapsed
        self._files: CertificateFiles | None = None
        self._num_changes = 0
        self._unwritten: Enrolled | None = None
        self._write_problem = ""
        self._addresses: tuple[str, ...] = ()
        self._authorities: tuple[bytes, ...] = ()
        """Those that a join token names: trusted for renewals, beside the folder's."""
        self.refusal = ""
        """Why the fleet gives this process no certificate any more; "" while it does."""
        self.is_of_another_fleet = False
        """Whether the gateway that a new join token names is of another fleet than this process."""
        self._is_fleet_unknown = False
        self._bundle: set[bytes] = set()
        self._bundle_number = 0
        self._wanted_bundle_number = 0
        self._problem = ""
        self._refused_until = 0.0
        self._is_doubted = False
        self._doubted_until = 0.0
        self._renew_at = 0.0
        self._renew_at_elapsed = 0.0
        self._valid_from = 0.0
        self._expires_at = 0.0

    @property
    def files(self) -> CertificateFiles:
        """The newest certificate, also while the disk does not take it."""
        assert self._files is not None, "open() comes first"
        return self._files

    @property
    def version(self) -> int:
        """A number that changes with `files`."""
        return self._num_changes

    async def open(self, token: JoinToken | None, seconds: float = 60.0) -> Identity:
        """Use the folder's certificate, or renew it, or join with `token`; return who this process is.

        Raise InvalidRequest if there is neither a certificate nor a token, and what `join` and `renew` raise. With a
        token, a process whose certificate is not renewed joins as a new member.
        """
        files = await asyncio.to_thread(self._read)
        if files is not None:
            self._know(files)
            if token is not None:
                self.follow(token)
            try:
                return await self._resume(files, seconds)
            except Unauthenticated as error:
                if token is None:
                    raise
                log.warning("certificate_not_renewed", error=error.message, role=self._role)
        if token is None:
            raise InvalidRequest(
                f"this {self._role} has no certificate in {self._folder} and no join token; make one on a gateway's "
                f"machine: `tandem fleet token --role {self._role}`"
            )
        return await self._join(token, seconds)

    async def open_with_file(self, path: Path, seconds: float = 60.0) -> Identity:
        """Do as `open`, with a join token that a gateway of this machine writes when it starts.

        The file may be missing, or left by an earlier gateway: it is read again until one of its tokens is taken. A
        token that was refused is not tried again: refusals count against all processes of this machine.
        """
        deadline, refused = time.monotonic() + seconds, ""
        problem: TandemError | None = None
        while True:
            token = await token_from_file(path, deadline - time.monotonic())
            try:
                if token.text != refused:
                    return await self.open(token, min(seconds, _TRY_SECONDS_WITH_FILE))
            except Unavailable as error:
                problem = error
            except Unauthenticated as error:
                problem, refused = error, token.text
            if problem is not None and time.monotonic() > deadline:
                raise problem
            await asyncio.sleep(_FILE_POLL_SECONDS)

    async def _resume(self, files: CertificateFiles, seconds: float) -> Identity:
        """Return whom the certificate of an earlier start names, renewed if it is time."""
        if not self._is_due() and not self._is_fleet_unknown:
            return _identity(files)
        try:
            return (await self._renew(files, seconds)).identity
        except (Unavailable, OSError):
            if self._is_fleet_unknown or not self._valid_from <= self._clock() < self._expires_at:
                raise
            return _identity(files)  # `run` tries again

    async def run(self) -> None:
        """Renew at half of the certificate's life, when the clock jumps, and when a new trust bundle is announced."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Renew if it is time. While nobody renews it, the certificate stays as it is; that is logged once."""
        if self._unwritten is not None:
            await self._write_or_wait(self._unwritten)
        is_behind = self._wanted_bundle_number > self._bundle_number
        is_wanted = self._is_due() or is_behind or self._is_doubted or self._is_fleet_unknown
        if not is_wanted or time.monotonic() < self._refused_until:
            return
        was_doubted, self._is_doubted = self._is_doubted, False
        try:
            await self._renew(self.files, _TRY_SECONDS)
            self._problem = ""
            if was_doubted:
                self._doubted_until = time.monotonic() + _REFUSED_PAUSE_SECONDS
        except (TandemError, OSError, ValueError) as error:
            self._is_doubted = was_doubted and not isinstance(error, Unauthenticated)
            if isinstance(error, Refused):
                self.refusal = error.message
            if isinstance(error, Unauthenticated):
                self._refused_until = time.monotonic() + _REFUSED_PAUSE_SECONDS
                self.is_of_another_fleet = self._is_fleet_unknown and not self.refusal
            if str(error) != self._problem:
                log.warning("certificate_not_renewed", error=str(error), role=self._role)
            self._problem = str(error)

    def announced(self, bundle_number: int) -> None:
        """A gateway's reply named this trust bundle: renew soon if it is newer than ours."""
        self._wanted_bundle_number = max(self._wanted_bundle_number, bundle_number)

    def doubted(self) -> None:
        """A gateway refuses this process: the next `check` asks for a new certificate, at most every 30 seconds."""
        self._is_doubted = time.monotonic() >= self._doubted_until

    def follow(self, token: JoinToken) -> None:
        """Renew at the gateway of a new join token. If its fleet may be another one, the next `check` finds out."""
        # No authority is known: another fleet, or ours after a rotation that this process has missed.
        self._is_fleet_unknown = self._bundle.isdisjoint(token.authorities)
        earlier = () if self._is_fleet_unknown else self._addresses
        self._addresses = tuple(dict.fromkeys((*token.addresses, *earlier)))[:MAX_ADDRESSES]
        self._authorities = token.authorities
        self._refused_until = 0.0

    async def _join(self, token: JoinToken, seconds: float) -> Identity:
        enrolled = await client.join(token, self._role, host=self._host, seconds=seconds)
        self._addresses = token.addresses
        await asyncio.to_thread(self._write, enrolled)  # first: a new member that is lost with its process is of no use
        self._take(enrolled)
        return enrolled.identity

    async def _renew(self, files: CertificateFiles, seconds: float) -> Enrolled:
        enrolled = await client.renew(self._addresses, files, authorities=self._authorities, seconds=seconds)
        self._take(enrolled)
        await self._write_or_wait(enrolled)
        return enrolled

    def _take(self, enrolled: Enrolled) -> None:
        # A gateway whose clock was ahead saw an authority leave, and announced more than there is.
        self._bundle_number = self._wanted_bundle_number = enrolled.bundle_number
        self._is_fleet_unknown = False
        self._know(enrolled.files)

    async def _write_or_wait(self, enrolled: Enrolled) -> None:
        """Write a renewed certificate. While the disk takes none, the next `check` tries again."""
        try:
            await asyncio.to_thread(self._write, enrolled)
            self._unwritten, self._write_problem = None, ""
        except OSError as error:
            self._unwritten = enrolled
            if str(error) != self._write_problem:
                log.warning("certificate_not_written", folder=str(self._folder), error=str(error), role=self._role)
            self._write_problem = str(error)

    def _write(self, enrolled: Enrolled) -> None:
        write_certificate(self._folder, enrolled.files)
        draft = self._folder / f".{_ENROLMENT}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"addresses": self._addresses, "bundle_number": enrolled.bundle_number}, file)
        draft.replace(self._folder / _ENROLMENT)

    def _read(self) -> CertificateFiles | None:
        """Return what an earlier start of this process has left; None if it is of no use."""
        try:
            files = read_certificate(self._folder)
            x509.load_pem_x509_certificates(files.bundle)
            facts = json.loads((self._folder / _ENROLMENT).read_text())
            identity = _identity(files)
            self._addresses = tuple(map(str, facts["addresses"]))
            self._bundle_number = int(facts["bundle_number"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("certificate_unreadable", folder=str(self._folder), error=str(error))
            return None
        return files if identity.role == self._role and self._addresses else None

    def _know(self, files: CertificateFiles) -> None:
        self._files = files
        self._num_changes += 1
        self._bundle = set(map(client.authority_pin, x509.load_pem_x509_certificates(files.bundle)))
        certificate = x509.load_pem_x509_certificate(files.certificate)
        self._valid_from = certificate.not_valid_before_utc.timestamp()
        self._expires_at = certificate.not_valid_after_utc.timestamp()
        issued_at = self._valid_from + EARLIER_SECONDS
        self._renew_at = (issued_at + self._expires_at) / 2
        # A gateway whose clock was ahead issues dates that seem to be valid for longer. It counts the seconds, too.
        self._renew_at_elapsed = self._elapsed() + (self._expires_at - issued_at) / 2

    def _is_due(self) -> bool:
        is_fresh = self._valid_from <= self._clock() < self._renew_at
        return not is_fresh or self._elapsed() >= self._renew_at_elapsed


def _identity(files: CertificateFiles) -> Identity:
    return identity_in(x509.load_pem_x509_certificate(files.certificate))


async def token_from_file(path: Path, seconds: float) -> JoinToken:
    """Read a join token that another process writes when it starts; wait for it. Raise InvalidRequest without one."""
    deadline, is_waiting = time.monotonic() + seconds, False
    while True:
        text = await asyncio.to_thread(_text_of, path)
        if text:
            return JoinToken.parse(text)
        if time.monotonic() > deadline:
            raise InvalidRequest(
                f"no join token in {path} after {seconds:g} s; is the gateway of this machine running? On another "
                "machine, set --join to a token of `tandem fleet token`; or do without certificates: "
                "--insecure-plaintext, here and at the gateway"
            )
        if not is_waiting:
            log.info("join_token_awaited", file=str(path), seconds=round(seconds, 1))
            is_waiting = True
        await asyncio.sleep(_FILE_POLL_SECONDS)


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the join token in {path}: {error}") from error
