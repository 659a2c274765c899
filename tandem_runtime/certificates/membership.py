"""What a process has as a member of a fleet: its certificate, the deny list, and what is open with its peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.deny_list import DenyList
from tandem_runtime.certificates.names import Identity, Role, is_id
from tandem_runtime.certificates.peers import Peers, seconds_since_boot
from tandem_runtime.certificates.plaintext import Plaintext
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.tasks import supervised

WORKER_ROLES: dict[pb.WorkerRole.ValueType, Role] = {
    pb.WORKER_ROLE_PREFILL: "prefill",
    pb.WORKER_ROLE_DECODE: "decode",
    pb.WORKER_ROLE_KV: "kv",
    pb.WORKER_ROLE_ENCODE: "encode",
}
"""The role in the certificate of each kind of worker."""


GatewayReply = cp.RegisterReply | cp.HeartbeatReply


class TlsSettings(Protocol):
    """The settings of certificates that all services share."""

    @property
    def tls_cert(self) -> str: ...

    @property
    def tls_key(self) -> str: ...

    @property
    def tls_ca(self) -> str: ...


class Renewer(Protocol):
    """Keeps the certificate of this process valid."""

    async def run(self) -> None:
        """Renew in time, until cancelled."""

    def announced(self, bundle_number: int) -> None:
        """A gateway's reply named this trust bundle: renew soon if it is newer."""

    def doubted(self) -> None:
        """A gateway refuses this process: find out soon whether it is a member still."""

    @property
    def exit_code(self) -> int:
        """The exit status of a process that had to end because its certificate is of no use any more; else 0."""

    def close(self) -> None:
        """The process shows its certificate no more."""


class FleetMember:
    """One process of a fleet. Hand it to servers and channels; None in its place means plain text."""

    def __init__(
        self,
        certificate: ProcessCertificate,
        renewer: Renewer | None = None,
        plaintext_until: float = 0.0,
        *,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = seconds_since_boot,
    ) -> None:
        """Without `renewer` others renew the certificate. The clocks: see `Peers`.

        Until `plaintext_until`, in Unix seconds, processes of release 0.2 are called and answered in plain text.
        """
        self.certificate = certificate
        self.plaintext = Plaintext(plaintext_until, clock)
        self._renewer = renewer
        self.denied = DenyList()
        self.peers = Peers(certificate.identity.fleet, self.denied, clock, elapsed)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def from_settings(
        cls, settings: TlsSettings, role: Role | None, plaintext_until: float = 0.0
    ) -> FleetMember | None:
        """Return the member that --tls-cert, --tls-key and --tls-ca describe; None without them.

        Raises InvalidRequest for files of no use. `role` is the only one that the process may have.
        """
        paths = {"--tls-cert": settings.tls_cert, "--tls-key": settings.tls_key, "--tls-ca": settings.tls_ca}
        if not any(paths.values()):
            return None
        if missing := [flag for flag, path in paths.items() if not path]:
            raise InvalidRequest(f"{' and '.join(missing)} is not set; give all of {', '.join(paths)}, or none")
        try:
            certificate = ProcessCertificate.from_files(*(Path(path) for path in paths.values()))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the certificate in {settings.tls_cert} cannot be used: {error}") from error
        if role is not None and certificate.identity.role != role:
            raise InvalidRequest(
                f"the certificate in {settings.tls_cert} is of a {certificate.identity.role}, this process is a "
                f"{role}; issue one for spiffe://{certificate.identity.fleet}/{role}/<id>"
            )
        return cls(certificate, plaintext_until=plaintext_until)

    @property
    def identity(self) -> Identity:
        return self.certificate.identity

    def worker(self, info: pb.WorkerInfo) -> Identity:
        """Return the identity that a registered worker's server must show; raises Unavailable if it can have none."""
        role = WORKER_ROLES.get(info.role)
        if role is None:
            raise Unavailable(f"worker {info.worker_id[:64]} has role {info.role}, which no certificate has")
        return self.expected(role, info.worker_id, info.address)

    def expected(self, role: Role, id: str, address: str) -> Identity:
        """Return the identity that must answer at `address`; raises Unavailable if `id` is none of a certificate."""
        try:
            return Identity(self.identity.fleet, role, id)
        except ValueError as error:
            raise Unavailable(
                f"the {role} {id[:64]!r} has registered without a certificate, so nothing proves who answers at "
                f"{address[:64]}; enrol it: {error}"
            ) from error

    def expected_or_role(self, role: Role, id: str, address: str) -> Identity | Role:
        """Return who must answer at `address`: the process `id`, which a gateway has named.

        An `id` of release 0.2 stands for any process of `role` while `plaintext` allows it. Then it raises Unavailable.
        """
        if self.plaintext.is_allowed and not is_id(id):
            return role
        return self.expected(role, id, address)

    @property
    def exit_code(self) -> int:
        """Return the exit status with which the process ends if it is a member no more; 0 while it is one."""
        return self._renewer.exit_code if self._renewer is not None else 0

    def refused(self) -> None:
        """A gateway refused this process by its certificate: renew it, or find out that the process must end."""
        if self._renewer is not None:
            self._renewer.doubted()

    def heard(self, reply: GatewayReply) -> None:
        """Apply what a gateway's reply says of the fleet: who is revoked, and which authorities to trust."""
        if reply.HasField("deny_list"):
            self.denied.apply(reply.deny_list.number, reply.deny_list.ids)
        if self._renewer is not None:
            self._renewer.announced(reply.bundle_number)

    def start(self) -> None:
        """Start to renew, to watch the files and to sweep the peers; call on the event loop."""
        loops = {"certificate-watch": self.certificate.watch, "peer-sweep": self.peers.run}
        if self._renewer is not None:
            loops["certificate-renewal"] = self._renewer.run
        self._tasks = [
            asyncio.create_task(supervised(name, loop, longest_pause_seconds=1.0), name=name)
            for name, loop in loops.items()
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._renewer is not None:
            self._renewer.close()
