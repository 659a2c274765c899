"""Processes join and renew over a TLS port where nobody has a name, and tell a gateway from everybody else."""

from __future__ import annotations

import asyncio
import errno
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from control_plane.fleet_identity.attempts import BURST, MAX_ADDRESSES, Attempts, address_of
from control_plane.fleet_identity.certificates import pem
from control_plane.fleet_identity.enrolment import EnrolmentServer
from control_plane.fleet_identity.gateway_certificate import GatewayCertificate
from control_plane.storage.migrate import migrate
from tandem.v1 import enrolment_pb2 as pb
from tandem.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from tandem_runtime.certificates.files import read_certificate, write_certificate
from tandem_runtime.certificates.names import Role, identity_of
from tandem_runtime.channel import call_error
from tandem_runtime.enrolment import client
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.errors import InvalidRequest, Overloaded, TandemError, Unauthenticated, Unavailable
from tests.control_plane.fleet_identity.world import SECRET, World, files_of, new_key, on_both, request_of


@asynccontextmanager
async def gateway(world: World, folder: Path | None = None) -> AsyncIterator[tuple[str, GatewayCertificate]]:
    """A gateway's enrolment port; yields its address and certificate."""
    certificate = GatewayCertificate(world.authority, world.database, folder)
    await certificate.open()
    server = EnrolmentServer("127.0.0.1:0", world.authority, certificate)
    address = await server.start()
    try:
        yield address, certificate
    finally:
        await server.stop()


async def token_for(world: World, *addresses: str, role: Role = "decode") -> JoinToken:
    return await world.authority.new_token(role, 60, 1, addresses)


@on_both
async def test_a_process_joins_writes_its_files_and_renews(world: World, tmp_path: Path) -> None:
    async with gateway(world) as (address, _):
        token = JoinToken.parse((await token_for(world, address)).text)
        joined = await client.join(token, "decode", host="d1")
        trust = await world.authority.trust()
        assert joined.identity.role == "decode" and joined.identity.fleet == trust.fleet
        assert joined.files.bundle == trust.bundle and joined.bundle_number == trust.bundle_number
        await asyncio.to_thread(write_certificate, tmp_path / "certificate", joined.files)
        files = await asyncio.to_thread(read_certificate, tmp_path / "certificate")
        renewed = await client.renew([address], files)
        assert renewed.identity == joined.identity
        assert renewed.files.certificate != files.certificate and renewed.files.key != files.key
        with pytest.raises(Unauthenticated, match="was used once"):
            await client.join(token, "decode")
        await world.authority.revoke(joined.identity)
        with pytest.raises(Unauthenticated, match="is revoked"):
            await client.renew([address], renewed.files)


async def test_another_gateway_is_asked_while_one_does_not_answer(world: World) -> None:
    async with gateway(world) as (address, _):
        joined = await client.join(await token_for(world, "127.0.0.1:1", address), "decode")
        assert joined.identity.role == "decode"
    with pytest.raises(Unavailable, match=r"no certificate after 0\.2 s: 127\.0\.0\.1:1: cannot connect"):
        await client.join(await token_for(world, "127.0.0.1:1"), "decode", seconds=0.2)


async def test_a_token_is_never_sent_to_another_fleet(world: World, make_empty: Callable[[bytes], World]) -> None:
    other = make_empty(SECRET)
    await migrated(other)
    async with gateway(other) as (address, _):
        token = await token_for(world, address)
        with pytest.raises(Unauthenticated, match="has no certificate of an authority that is expected"):
            await client.join(token, "decode")
        issued, key = await _member(world)
        with pytest.raises(Unauthenticated, match="has no certificate of an authority that is expected"):
            await client.renew([address], files_of(issued, key))


async def test_a_gateway_that_is_left_is_found_though_another_fleet_has_taken_the_port_of_one_that_is_gone(
    world: World, make_empty: Callable[[bytes], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_empty(SECRET)
    await migrated(other)
    monkeypatch.setattr(random, "sample", lambda addresses, number: sorted(addresses, key=addresses.index))
    async with gateway(other) as (taken, _), gateway(world) as (left, _):
        joined = await client.join(await token_for(world, taken, left), "decode")
        assert joined.identity.role == "decode"
        assert (await client.renew([taken, left], joined.files)).identity == joined.identity
        with pytest.raises(Unavailable, match=r"authority that is expected.*; 127\.0\.0\.1:1: cannot connect"):
            await client.join(await token_for(world, taken, "127.0.0.1:1"), "decode", seconds=0.2)


async def test_a_worker_of_the_same_fleet_cannot_collect_tokens(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    files = files_of(issued, key)
    server = grpc.aio.server()
    chain = issued.chain
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(files.key, chain)]))
    await server.start()
    try:
        token = await token_for(world, f"127.0.0.1:{port}")
        with pytest.raises(Unauthenticated, match=f"is decode {issued.identity.id}, and only a gateway may admit"):
            await client.join(token, "decode")
    finally:
        await server.stop(None)


async def test_an_authority_beside_a_foreign_leaf_deceives_nobody(
    world: World, make_empty: Callable[[bytes], World]
) -> None:
    """The pinned certificate is public: an attacker can present it, but not sign with it."""
    other = make_empty(SECRET)
    await migrated(other)
    certificate = GatewayCertificate(other.authority, other.database)
    await certificate.open()
    real = (await world.authority.trust()).issuing.certificate
    chain = pem(certificate.peers.certificate, real)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(certificate.key, chain)]))
    await server.start()
    try:
        with pytest.raises(Unauthenticated, match="is not by its authority"):
            await client.join(await token_for(world, f"127.0.0.1:{port}"), "decode")
    finally:
        await server.stop(None)


async def test_everybody_is_admitted_again_after_the_clock_has_jumped_26_hours(world: World) -> None:
    world.pass_hours(-26)  # what is issued now is expired by the clock of TLS, which no test can move
    key = new_key()
    issued = await world.join(key)
    certificate = GatewayCertificate(world.authority, world.database)
    await certificate.open()
    server = EnrolmentServer("127.0.0.1:0", world.authority, certificate)
    address = await server.start()
    try:
        with pytest.raises(Unavailable, match="set the clocks"):
            await client.renew([address], files_of(issued, key), seconds=0.1)
        world.pass_hours(26)
        await certificate.check()
        renewed = await client.renew([address], files_of(issued, key))
        assert renewed.identity == issued.identity
    finally:
        await server.stop()


async def test_a_gateway_whose_clock_is_behind_replaces_no_valid_certificate_by_an_expired_one(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    async with gateway(world) as (address, _):
        world.pass_hours(-26)
        with pytest.raises(Unavailable, match=r"the certificate that the fleet issued .* set the clocks"):
            await client.renew([address], files_of(issued, key), seconds=0.1)
        world.pass_hours(26)
        assert (await client.renew([address], files_of(issued, key))).identity == issued.identity


async def test_a_gateway_uses_a_renewed_certificate_that_the_disk_does_not_take(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = GatewayCertificate(world.authority, world.database, tmp_path / "gateway")
    await certificate.open()
    before = certificate.files
    world.pass_hours(13)
    with monkeypatch.context() as full:
        full.setattr("control_plane.fleet_identity.gateway_certificate.write_certificate", _disk_is_full)
        await certificate.check()
    renewed = certificate.files
    assert renewed != before and await asyncio.to_thread(read_certificate, tmp_path / "gateway") == before
    await certificate.check()
    assert await asyncio.to_thread(read_certificate, tmp_path / "gateway") == certificate.files == renewed


async def test_a_gateway_counts_the_seconds_of_its_certificate(world: World) -> None:
    seconds = [1000.0]
    certificate = GatewayCertificate(world.authority, world.database, elapsed=lambda: seconds[0])
    await certificate.open()
    first, version = certificate.files, certificate.version
    world.pass_hours(-1)  # it was issued by a clock that was ahead
    seconds[0] += 12.1 * 3600
    await certificate.check()
    assert certificate.files != first and certificate.version != version


def _disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_gateway_renews_at_half_of_its_life_and_after_each_jump(world: World, tmp_path: Path) -> None:
    certificate = GatewayCertificate(world.authority, world.database, tmp_path / "gateway")
    await certificate.open()
    identity, serials = certificate.identity, [certificate.peers.certificate.serial_number]
    for hours in (1.0, 12.0, -40.0, 66.0):
        world.pass_hours(hours)
        await certificate.check()
        assert certificate.identity == identity
        serials.append(certificate.peers.certificate.serial_number)
        written = await asyncio.to_thread(read_certificate, tmp_path / "gateway")
        assert written == certificate.files and identity_of(written.certificate) == identity
    assert serials[0] == serials[1] and len(set(serials)) == 4


async def test_tokens_and_members_of_before_a_rotation_get_in_during_it(world: World) -> None:
    world.pass_hours(-13)  # the clock of TLS cannot be moved: what is issued 13 hours later must be valid now
    async with gateway(world) as (address, certificate):
        before = await world.authority.new_token("decode", 86_400, 1, (address,))
        joined = await client.join(await token_for(world, address), "decode")
        await world.authority.add_authority()
        await certificate.check()
        during = await world.authority.new_token("decode", 86_400, 1, (address,))
        await world.authority.switch_authority(force=True)
        world.pass_hours(13)  # the gateway renews, by both authorities
        await certificate.check()
        assert certificate.peers.authority != certificate.enrolment.authority
        early = await client.join(before, "decode")
        assert early.bundle_number == 3
        renewed = await client.renew([address], joined.files)
        assert (await client.join(during, "decode")).files.bundle == renewed.files.bundle
        await world.authority.remove_old_authority()
        await certificate.check()
        assert certificate.peers.authority == certificate.enrolment.authority
        again = await client.renew([address], renewed.files)
        assert again.bundle_number == 4
        with pytest.raises(Unauthenticated, match="the authority was replaced"):
            await client.renew([address], joined.files)


async def test_what_is_issued_serves_both_sides_of_mutual_tls(world: World) -> None:
    """P-256 certificates: grpcio takes them as a server's and as a client's, and checks the expected name."""
    key, other = new_key(), new_key()
    served, calling = await world.join(key), await world.join(other, "prefill")
    server = grpc.aio.server()
    seen: list[Any] = []

    async def answer(request: bytes, context: Any) -> bytes:
        seen.append(context.auth_context()["x509_pem_cert"][0])
        return request

    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.S", {"Call": handler}),))
    mine = files_of(served, key)
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([(mine.key, mine.certificate)], mine.bundle, require_client_auth=True),
    )
    await server.start()
    theirs = files_of(calling, other)

    async def call(expected: str) -> bytes:
        credentials = grpc.ssl_channel_credentials(theirs.bundle, theirs.key, theirs.certificate)
        options = [("grpc.ssl_target_name_override", expected), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            start: Any = channel.unary_unary("/t.S/Call")
            reply: bytes = await start(b"x", timeout=10)
            return reply

    try:
        assert await call(served.identity.dns_name) == b"x"
        assert await call(served.identity.role_dns_name) == b"x"
        assert identity_of(seen[0]) == calling.identity
        with pytest.raises(grpc.aio.AioRpcError):
            await call(replace(served.identity, id="0" * 16).dns_name)
    finally:
        await server.stop(None)


# --------------------------------------------------------------------------------------------------------- bounds


async def test_the_port_takes_small_messages_from_callers_who_call_seldom(world: World) -> None:
    async with gateway(world) as (address, certificate), nameless(address, certificate) as stub:
        for message, reason in (
            (pb.EnrolRequest(token="x" * 200), "token has 200 characters, the limit is 128"),
            (pb.EnrolRequest(role="x" * 20), "role has 20 characters, the limit is 16"),
            (pb.EnrolRequest(host="x" * 300), "host has 300 characters, the limit is 256"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await answered(stub.Enrol(message))
        with pytest.raises(Overloaded, match="larger than max"):
            await answered(stub.Enrol(pb.EnrolRequest(token="x" * 100_000)))
        wrong = pb.EnrolRequest(token="wrong", role="decode", certificate_request=request_of(new_key()))
        with pytest.raises(Overloaded, match="too many calls from this address") as refused:
            for _ in range(int(BURST)):
                with pytest.raises(Unauthenticated):
                    await answered(stub.Enrol(wrong))
        assert refused.value.retry_after_seconds


def test_an_address_may_call_again_after_a_while_and_others_meanwhile() -> None:
    now = [0.0]
    attempts = Attempts(lambda: now[0])
    for _ in range(int(BURST)):
        attempts.start("a")
    with pytest.raises(Overloaded, match=r"try again in 0\.1 s"):
        attempts.start("a")
    attempts.start("b")
    now[0] += 0.11
    attempts.start("a")
    for _ in range(100):
        attempts.failed("a")
    with pytest.raises(Overloaded) as refused:
        attempts.start("a")
    assert refused.value.retry_after_seconds is not None and refused.value.retry_after_seconds < 30
    for number in range(MAX_ADDRESSES + 10):
        attempts.start(f"address {number}")
    assert len(attempts._buckets) == MAX_ADDRESSES


def test_peers_count_by_address_and_by_network_where_one_machine_has_many() -> None:
    peers = ("ipv4:10.0.0.5:50123", "ipv6:%5B2001:db8::1%5D:1", "ipv6:[fe80::9%25eth0]:1", "unix:", "unix:/a/path")
    assert [address_of(peer) for peer in peers] == ["10.0.0.5", "2001:db8::/64", "fe80::/64", "unix:", "unix:"]


async def test_the_port_asks_nobody_for_a_certificate_and_speaks_no_plain_text(world: World) -> None:
    async with gateway(world) as (address, certificate):
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cadata=certificate.peers.bundle.decode())
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=certificate.identity.dns_name
        )
        assert x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.transport.abort()
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await EnrolmentServiceStub(channel).Enrol(pb.EnrolRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def migrated(world: World) -> None:
    await migrate(world.database)
    await world.authority.open()


async def _member(world: World) -> Any:
    key = new_key()
    return await world.join(key), key


@asynccontextmanager
async def nameless(address: str, certificate: GatewayCertificate) -> AsyncIterator[Any]:
    """A stub on the port as any stranger has it who knows the authority."""
    credentials = grpc.ssl_channel_credentials(certificate.peers.bundle)
    options = [("grpc.ssl_target_name_override", certificate.identity.dns_name)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield EnrolmentServiceStub(channel)


async def answered(call: Any) -> TandemError | None:
    """Wait for a call that fails, and raise its error as a typed one."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise call_error(error) from error
    return None
