"""Every method of every service refuses each caller that the table does not name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog
from google.protobuf.message import Message

from tandem_runtime.certificates.access import RULES
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import CertificateFiles, write_certificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import ROLES, Identity, Role
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InternalError, PeerUnauthenticated, PermissionDenied, TandemError, Unavailable
from tandem_runtime.server import GrpcServer
from tests.certificates import Authority, new_id
from tests.tandem_runtime.certificates.services import Method, add_all, methods, services, truthful

METHODS = methods()


def test_each_method_of_the_protos_has_a_row_and_each_row_a_method() -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert {method.path for method in METHODS} | {reflection} == set(RULES)


def test_no_worker_may_attach_to_a_worker_or_read_stored_blocks() -> None:
    assert RULES["/tandem.v1.WorkerService/Attach"].roles == {"gateway"}
    assert RULES["/tandem.v1.KvTransferService/ReadBlocks"].roles == {"kv"}


@dataclass
class World:
    """A server with every service, and its fleet."""

    authority: Authority
    folder: Path
    server: FleetMember
    address: str

    def member(self, role: Role, authority: Authority | None = None, **more: Any) -> FleetMember:
        """Return a client; of another authority, it trusts this server, so that only the server can refuse."""
        authority = authority or self.authority
        identity = authority.identity(role)
        write_certificate(self.folder / identity.id, authority.issue(identity, bundle=self.authority.bundle, **more))
        return FleetMember(ProcessCertificate.in_folder(self.folder / identity.id))

    def channel(self, member: FleetMember | None, expect: Identity | None = None) -> grpc.aio.Channel:
        return open_channel(self.address, member, expect or self.server.identity)


@pytest_asyncio.fixture(params=["tcp", "unix"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    authority = Authority()
    member = authority.member(tmp_path, "gateway")
    listen = "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/grpc.sock"
    server = GrpcServer(listen, add_all, [service.full_name for service in services()], member=member)
    address = await server.start()
    with structlog.testing.capture_logs():  # a traceback for each method that nothing implements takes most of the time
        yield World(authority, tmp_path, member, address)
    await server.stop(0)


async def _answers(channel: grpc.aio.Channel, request: Callable[[Method], Message]) -> dict[str, type[BaseException]]:
    """Call every method; return the kind of the error of each. A call without an error has no entry."""
    answers: dict[str, type[BaseException]] = {}
    async with channel:
        for method in METHODS:
            try:
                await method.call(channel, request(method))
            except TandemError as error:
                answers[method.path] = type(error)
    return answers


def _all(kind: type[BaseException]) -> dict[str, type[BaseException]]:
    return {method.path: kind for method in METHODS}


async def test_a_caller_without_a_certificate_is_refused_everywhere(world: World) -> None:
    assert await _answers(world.channel(None), lambda method: method.request()) == _all(Unavailable)
    for key, certificate in ((None, None), _own(Authority())):
        credentials = grpc.ssl_channel_credentials(world.authority.bundle, key, certificate)
        name = (("grpc.ssl_target_name_override", world.server.identity.dns_name),)
        channel = grpc.aio.secure_channel(world.address, credentials, options=name)
        async with channel:
            for method in METHODS:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await method.call(channel, method.request())
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def _own(authority: Authority) -> tuple[bytes, bytes]:
    files: CertificateFiles = authority.issue(authority.identity("gateway"))
    return files.key, files.certificate


async def test_another_authority_is_refused_everywhere(world: World) -> None:
    stranger = world.member("gateway", Authority(world.authority.fleet))
    assert await _answers(world.channel(stranger), lambda method: method.request()) == _all(Unavailable)


async def test_an_expired_certificate_is_refused_everywhere(world: World) -> None:
    expired = world.member("gateway", seconds=-1.0)
    assert await _answers(world.channel(expired), lambda method: method.request()) == _all(Unavailable)


async def test_another_fleet_of_the_same_authority_is_refused_everywhere(world: World) -> None:
    other = Identity(new_id(), "gateway", new_id())
    write_certificate(world.folder / "other", world.authority.issue(other))
    member = FleetMember(ProcessCertificate.in_folder(world.folder / "other"))
    assert await _answers(world.channel(member), lambda method: method.request()) == _all(PeerUnauthenticated)


async def test_a_revoked_caller_is_refused_everywhere(world: World) -> None:
    revoked = world.member("gateway")
    channel = world.channel(revoked)
    await METHODS[-1].call(channel, METHODS[-1].request())  # health answers: the connection stands
    world.server.denied.apply(1, [revoked.identity.id])
    assert await _answers(channel, lambda method: method.request()) == _all(PeerUnauthenticated)


async def test_an_answer_of_another_process_is_refused_everywhere(world: World) -> None:
    client = world.member("decode")
    for other in (world.authority.identity("gateway"), Identity(world.authority.fleet, "kv", world.server.identity.id)):
        assert await _answers(world.channel(client, other), lambda method: method.request()) == _all(Unavailable)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_call_what_its_row_names_and_nothing_else(world: World, role: Role) -> None:
    client = world.member(role)
    answers = await _answers(world.channel(client), lambda method: truthful(method, role, client.identity.id))
    allowed = {path for path, rule in RULES.items() if role in rule.roles}
    if role == "encode":  # no WorkerRole says so yet: it cannot state its role truthfully
        allowed.discard("/tandem.v1.ControlPlaneService/Register")
    refused = {path for path, kind in answers.items() if kind is PermissionDenied}
    assert refused == {method.path for method in METHODS} - allowed
    assert {kind for path, kind in answers.items() if path not in refused} <= {InternalError}  # nothing implements it


@pytest.mark.parametrize("role", ["prefill", "decode", "kv"])
async def test_a_worker_can_neither_name_another_nor_take_another_role(world: World, role: Role) -> None:
    client = world.member(role)
    async with world.channel(client) as channel:
        for method in METHODS:
            if RULES[method.path].claims_id is not None and role in RULES[method.path].roles:
                with pytest.raises(PermissionDenied, match="may name itself only"):
                    await method.call(channel, truthful(method, role, new_id()))
        register = next(method for method in METHODS if method.path.endswith("/Register"))
        others: set[Role] = {"prefill", "decode", "kv"}
        for other in others - {role}:
            with pytest.raises(PermissionDenied, match=f"says {role}"):
                await register.call(channel, truthful(register, other, client.identity.id))


async def test_a_refusal_names_method_role_and_what_is_allowed(world: World) -> None:
    client = world.member("decode")
    attach = next(method for method in METHODS if method.path.endswith("/Attach"))
    async with world.channel(client) as channel:
        with pytest.raises(PermissionDenied) as refused:
            await attach.call(channel, attach.request())
    assert refused.value.message == (
        f"/tandem.v1.WorkerService/Attach may be called by gateway; the caller is a decode, {client.identity.id}"
    )
    assert refused.value.grpc_status == grpc.StatusCode.PERMISSION_DENIED
