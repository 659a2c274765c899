"""A fleet of real processes with certificates serves, and answers nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1.worker_pb2_grpc import WorkerServiceStub
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role
from tandem_runtime.channel import open_channel, open_worker_channel
from tandem_runtime.errors import PeerUnauthenticated, PermissionDenied, Unavailable
from tests.certificates import Authority
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import greedy


class _Folder:
    """Certificates in files, as cert-manager would keep them."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        self._folder = folder

    def issue(self, role: Role) -> tuple[Identity, dict[str, str]]:
        """Return a new identity and the settings that name its files."""
        identity = self.authority.identity(role)
        files = self.authority.issue(identity)
        contents = {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.bundle}
        for name, content in contents.items():
            (self._folder / f"{identity.id}.{name}").write_bytes(content)
        return identity, {name: str(self._folder / f"{identity.id}.{name}") for name in contents}

    def member(self, role: Role) -> FleetMember:
        paths = self.issue(role)[1]
        return FleetMember(ProcessCertificate.from_files(*map(Path, paths.values())))


async def _nothing() -> AsyncIterator[Any]:
    """Send no message: gRPC calls a message that is sent into a refused call an internal error."""
    await asyncio.Event().wait()
    yield


async def test_two_hosts_serve_with_certificates_and_answer_nobody_else(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, prompt = checkpoint("llama"), random.Random(5).choices(range(3, 300), k=130)
    certificates = _Folder(tmp_path)
    gateway: dict[str, Any] = dict(certificates.issue("gateway")[1])
    async with Fleet(tmp_path, **gateway) as fleet:

        def start(role: Role, host: str, *flags: str) -> Identity:
            identity, paths = certificates.issue(role)
            tls = [text for name, path in paths.items() for text in (f"--{name.replace('_', '-')}", path)]
            fleet.start(role, identity.id, "--host-id", host, *tls, *flags)
            return identity

        engine = ("--model", str(model), *SMALL, "--max-num-batched-tokens", "64")
        for host in ("host-a", "host-b"):
            start("kv", host, "--transports", "tcp,grpc")
        prefill, decode = start("prefill", "host-a", *engine), start("decode", "host-b", *engine)
        await fleet.ready()
        await fleet.proven()
        stream = await fleet.dispatcher(decode.id, prefill.id).submit(token_request("tiny-llama", prompt, 16))
        async for _ in stream:
            pass
        assert [choice.tokens for choice in stream.state.choices] == [greedy(model, prompt, 16)]
        assert [choice.ledger and choice.ledger.transport for choice in stream.state.choices] == ["tcp"]

        infos = [worker.info for worker in fleet.registry.workers()]
        assert {info.worker_id for info in infos} == set(fleet.services)
        for address in [fleet.gateway.grpc_address, *(info.address for info in infos)]:
            async with open_channel(address) as plain:
                with pytest.raises(Unavailable):
                    await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest())
        found = next(info for info in infos if info.worker_id == decode.id)
        async with open_worker_channel(found, certificates.member("prefill")) as channel:
            stub: Any = WorkerServiceStub(channel)
            with pytest.raises(PermissionDenied, match="may be called by gateway"):
                await stub.Attach(_nothing()).read()

        member = fleet.gateway.member
        assert member is not None
        member.denied.apply(1, [decode.id])
        with pytest.raises(PeerUnauthenticated, match="is revoked"):
            await fleet.stats(decode.id)
        gone = fleet.registry.get
        await until(lambda: (worker := gone(decode.id)) is None or not worker.is_usable, 20)
