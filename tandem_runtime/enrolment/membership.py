"""Makes a process a member of the fleet when it starts.

The first of these that applies:

    --tls-cert, --tls-key, --tls-ca     certificates from elsewhere
    --insecure-plaintext                no certificate
    --join, --join-file                 the folder's certificate of an earlier start, else join with the token
    a certificate in the folder         of an earlier start, where the file with the join token is gone
    <state directory>/join/<role>       join with a token that this machine's gateway writes when it starts
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Protocol

from tandem_runtime import paths
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import folder_version
from tandem_runtime.certificates.membership import FleetMember, TlsSettings
from tandem_runtime.certificates.names import Role
from tandem_runtime.enrolment.claimed_folder import ClaimedFolder
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.enrolment.keeper import CHECK_SECONDS, CertificateKeeper
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger

log = get_logger(__name__)

JOIN_SECONDS = 60.0
"""Seconds in which a gateway must answer, or its join token appear."""

EXIT_REFUSED = 78
"""EX_CONFIG of sysexits.h: the fleet has revoked this process, so a restart would fail for the same reason."""

_EXIT_REPLACED = 1
"""A restart helps: the process joins the fleet that its gateway is of now."""


class JoinSettings(TlsSettings, Protocol):
    """The settings of all services that join a fleet."""

    @property
    def join(self) -> str: ...

    @property
    def join_file(self) -> str: ...

    @property
    def plaintext_until_unix_seconds(self) -> float: ...

    @property
    def allows_plaintext(self) -> bool: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def state_dir(self) -> str: ...


class StoppedEarly(Exception):
    """The process was told to end before it had joined."""


async def member_of_fleet(
    settings: JoinSettings, role: Role, drain: asyncio.Event | None = None, seconds: float = JOIN_SECONDS
) -> FleetMember | None:
    """Return this process as a member; None in plain text. Call `start` on it, and `close` at the end.

    Sets `drain` when the fleet has revoked the process, or when this machine's gateway has become one of another fleet;
    `exit_code` of the member is the status to end with then.
    Raise StoppedEarly if `drain` is set meanwhile, InvalidRequest for settings of no use, Unauthenticated for a refused
    token, Unavailable if no gateway answers within `seconds`.
    """
    drain = drain or asyncio.Event()
    joining = asyncio.create_task(_member(settings, role, drain, seconds))
    stopping = asyncio.create_task(drain.wait())
    try:
        await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            raise StoppedEarly(f"told to end before the {role} had joined the fleet")
        return joining.result()
    finally:
        joining.cancel()
        stopping.cancel()
        await asyncio.gather(joining, stopping, return_exceptions=True)


async def _member(settings: JoinSettings, role: Role, drain: asyncio.Event, seconds: float) -> FleetMember | None:
    plaintext_until = settings.plaintext_until_unix_seconds
    if (member := FleetMember.from_settings(settings, role, plaintext_until)) is not None:
        return member
    if settings.allows_plaintext:
        return None
    if settings.join and settings.join_file:
        raise InvalidRequest("--join and --join-file are both set; give one of them")
    state_dir = paths.state_dir(settings.state_dir or None, "--state-dir")
    folder = await asyncio.to_thread(ClaimedFolder.claim, state_dir / "certificates", settings.worker_id or role)
    file = _token_file(settings, state_dir / "join" / role)
    try:
        keeper = CertificateKeeper(folder.path, role, host=socket.gethostname())
        await _open(keeper, settings, folder.path, file, seconds)
        certificate = ProcessCertificate(lambda: keeper.files, lambda: keeper.version)
    except BaseException:
        folder.release()
        raise
    renewer = _OwnRenewer(keeper, folder, file, drain)
    return FleetMember(certificate, renewer=renewer, plaintext_until=plaintext_until)


async def _open(
    keeper: CertificateKeeper, settings: JoinSettings, folder: Path, file: Path | None, seconds: float
) -> None:
    if file is None:
        await keeper.open(JoinToken.parse(settings.join), seconds)
    elif await asyncio.to_thread(_has_own, folder, file):
        await keeper.open(None, seconds)
    else:
        await keeper.open_with_file(file, seconds)


def _token_file(settings: JoinSettings, of_this_machine: Path) -> Path | None:
    if settings.join:
        return None
    return Path(settings.join_file).expanduser() if settings.join_file else of_this_machine


def _has_own(folder: Path, file: Path) -> bool:
    return folder_version(folder) != "" and not file.exists()


class _OwnRenewer:
    """Renews this process's certificate, in the folder that it claimed."""

    def __init__(
        self, keeper: CertificateKeeper, folder: ClaimedFolder, file: Path | None, drain: asyncio.Event
    ) -> None:
        self._keeper = keeper
        self._folder = folder
        self._file = file
        self._drain = drain
        self._seen: tuple[int, int] | None = None
        self._problem = ""
        self.exit_code = 0

    def announced(self, bundle_number: int) -> None:
        self._keeper.announced(bundle_number)

    def doubted(self) -> None:
        self._keeper.doubted()

    async def run(self) -> None:
        """Renew in time, until cancelled, or until the process must end."""
        while self.exit_code == 0:
            await asyncio.sleep(CHECK_SECONDS)
            await self._keeper.check()
            await self._look()
        self._drain.set()

    async def _look(self) -> None:
        """Find out whether the process is a member of its fleet still."""
        if self._keeper.refusal:
            log.error("certificate_refused", reason=self._keeper.refusal, remedy=_remedy(self._folder.path))
            self.exit_code = EXIT_REFUSED
        elif self._keeper.is_of_another_fleet:
            log.error("fleet_replaced", file=str(self._file), remedy="start the process again: it joins that fleet")
            self.exit_code = _EXIT_REPLACED
        elif (token := await asyncio.to_thread(self._changed_token)) is not None:
            self._keeper.follow(token)

    def _changed_token(self) -> JoinToken | None:
        """Return the join token of this machine if its file has changed. A file that cannot be read is read again."""
        stamp = None if self._file is None else _stamp(self._file)
        if stamp is None or stamp == self._seen:
            return None
        assert self._file is not None, "it has a stamp"
        try:
            text = self._file.read_text()
            self._seen, self._problem = stamp, ""
            return JoinToken.parse(text)
        except (OSError, ValueError, InvalidRequest) as error:
            if str(error) != self._problem:
                log.warning("join_token_unreadable", file=str(self._file), error=str(error))
            self._problem = str(error)
            return None

    def close(self) -> None:
        self._folder.release()


def _remedy(folder: Path) -> str:
    return f"delete {folder} and start the process with a new token of `tandem fleet token`: it joins as a new member"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # there is none: the tokens of other machines come by --join
        return None
    return status.st_mtime_ns, status.st_ino
