"""The authority in SQL: one fleet for all gateways, certificates that name processes, renewal, rotation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import control_plane.storage
from control_plane.fleet_identity.certificates import MAX_REQUEST_BYTES, process_certificate, requested_key
from control_plane.fleet_identity.sealed_key import unseal
from control_plane.storage.migrate import migrate
from control_plane.storage.tables import accounts, authorities, certificates
from tandem_runtime.certificates.names import METRICS_NAME, Identity, identity_of
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.errors import InvalidRequest, Unauthenticated
from tests.control_plane.fleet_identity.world import SECRET, World, der, new_key, on_both, proof, request_of


def upgrade(connection: sa.Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(control_plane.storage.__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


async def test_a_database_of_the_version_before_keeps_its_accounts(open_world: Callable[..., World]) -> None:
    world = open_world()
    async with world.database.begin() as connection:
        await connection.run_sync(upgrade, "0001")
        await connection.execute(sa.insert(accounts).values(id="me", created_ms=1))
    await migrate(world.database)
    await world.authority.open()
    async with world.database.each() as connection:
        assert (await connection.execute(sa.select(accounts.c.id))).scalars().all() == ["me"]


@on_both
async def test_gateways_that_start_at_once_make_one_fleet(open_world: Callable[..., World]) -> None:
    worlds = [open_world() for _ in range(5)]
    await migrate(worlds[0].database)
    opened = await asyncio.gather(*(world.authority.open() for world in worlds))
    assert len({trust.fleet for trust in opened}) == 1
    assert len({trust.bundle for trust in opened}) == 1
    issued = await asyncio.gather(*(world.join() for world in worlds))
    for each in issued:
        each.certificate.verify_directly_issued_by(opened[0].issuing.certificate)
    assert len({each.identity.id for each in issued}) == 5


async def test_a_gateway_with_another_secret_is_told_so_in_one_sentence(
    world: World, open_world: Callable[..., World]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await open_world(b"\x08" * 32).authority.open()
    assert "the secret of this control plane does not open" in refused.value.message
    assert "--secret" in refused.value.message and refused.value.message.count(". ") == 0


@on_both
async def test_a_sealed_key_opens_only_with_its_own_certificate(world: World) -> None:
    await world.authority.add_authority()
    first, second = (await world.authority.trust()).authorities
    assert first.sealed_key is not None
    assert b"PRIVATE" not in first.sealed_key
    assert unseal(first.sealed_key, first.certificate, SECRET).public_key() == first.certificate.public_key()
    with pytest.raises(InvalidRequest, match="does not open"):
        unseal(first.sealed_key, second.certificate, SECRET)


async def test_a_certificate_names_its_process_and_serves_both_sides_for_a_day(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    certificate = issued.certificate
    assert certificate.public_key() == key.public_key()
    assert identity_of(der(certificate)) == issued.identity and issued.identity.role == "decode"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [issued.identity.uri]
    assert names.get_values_for_type(x509.DNSName) == [*issued.identity.dns_names, METRICS_NAME]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    now = datetime.fromtimestamp(world.database.now(), UTC)
    assert abs(now - timedelta(hours=2) - certificate.not_valid_before_utc) < timedelta(seconds=30)
    assert abs(now + timedelta(hours=24) - certificate.not_valid_after_utc) < timedelta(seconds=30)
    authority = (await world.authority.trust()).issuing.certificate
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


async def test_names_that_a_request_asks_for_are_ignored(world: World) -> None:
    key = new_key()
    wish = x509.SubjectAlternativeName([x509.DNSName("gateway.tandem.internal")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway 0000000000000000")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(wish, critical=False)
    request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    issued = await world.authority.enrol(await world.credential(), "decode", request, "")
    assert b"gateway" not in der(issued.certificate)


def _ed25519_request() -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(serialization.Encoding.DER)


def _p384_request() -> bytes:
    return request_of(ec.generate_private_key(ec.SECP384R1()))


def _unproved_request() -> bytes:
    request = bytearray(request_of(new_key()))
    request[-1] ^= 1
    return bytes(request)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"", "no certificate request"),
        (lambda: b"\x30" * 200, "no certificate request"),
        (lambda: bytes(MAX_REQUEST_BYTES + 1), "8,193 bytes, at most 8,192"),
        (_ed25519_request, "not P-256"),
        (_p384_request, "not P-256"),
        (_unproved_request, "not signed with its own key"),
    ],
)
def test_a_request_without_a_proved_key_is_refused(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        requested_key(make())


async def test_a_request_that_is_refused_uses_no_token(world: World) -> None:
    credential = await world.credential()
    with pytest.raises(InvalidRequest):
        await world.authority.enrol(credential, "decode", b"", "")
    await world.authority.enrol(credential, "decode", request_of(new_key()), "")


# -------------------------------------------------------------------------------------------------------- renewal


@on_both
async def test_a_certificate_renews_with_its_key_and_keeps_its_name(world: World) -> None:
    key, new = new_key(), new_key()
    issued = await world.join(key)
    renewed = await world.renew(issued, key, new)
    assert renewed.identity == issued.identity and renewed.certificate.public_key() == new.public_key()
    assert renewed.certificate.serial_number != issued.certificate.serial_number
    (member,) = await world.authority.members()
    assert member.identity == issued.identity and member.host == "a host"


async def test_a_certificate_that_expired_in_a_jump_of_26_hours_renews(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    world.pass_hours(26)
    (member,) = await world.authority.members()
    assert member.state(world.database.now_ms()) == "expired"
    renewed = await world.renew(issued, key)
    now = datetime.fromtimestamp(world.database.now(), UTC)
    assert renewed.certificate.not_valid_before_utc < now < renewed.certificate.not_valid_after_utc


async def test_a_certificate_that_expired_more_than_30_days_ago_does_not_renew(world: World) -> None:
    key = new_key()
    issued = await world.join(key)
    world.pass_hours(24 * 31 - 1)
    assert (await world.renew(issued, key)).identity == issued.identity
    world.pass_hours(2)
    with pytest.raises(Unauthenticated, match=r"expired 30 days ago.*fleet token --role decode"):
        await world.renew(issued, key)


async def test_nobody_renews_a_certificate_without_its_key(world: World) -> None:
    key = new_key()
    issued, request = await world.join(key), request_of(new_key())
    for signature in (b"", proof(new_key(), request), proof(key, request_of(new_key())), proof(key, request) + b"\0"):
        with pytest.raises(Unauthenticated, match="signature is not one by the key"):
            await world.authority.renew(der(issued.certificate), request, signature)


async def test_a_certificate_of_another_authority_does_not_renew(world: World) -> None:
    fake, key = new_key(), new_key()
    fleet = (await world.authority.trust()).fleet
    identity, now_ms = Identity(fleet, "decode", "0" * 16), world.database.now_ms()
    real = (await world.authority.trust()).issuing.certificate
    forged = process_certificate(real, fake, identity, key.public_key(), now_ms, 3600)
    request = request_of(new_key())
    with pytest.raises(Unauthenticated, match="not issued by this fleet"):
        await world.authority.renew(der(forged), request, proof(key, request))
    with pytest.raises(InvalidRequest, match="is no certificate"):
        await world.authority.renew(b"\x30\x03", request, b"")
    with pytest.raises(InvalidRequest, match="at most 8,192"):
        await world.authority.renew(bytes(MAX_REQUEST_BYTES + 1), request, b"")


# ------------------------------------------------------------------------------------------------------- rotation


@on_both
async def test_an_authority_is_replaced_without_a_process_that_trusts_too_little(world: World) -> None:
    # 1. One authority; one member.
    key = new_key()
    issued = await world.join(key)
    first = await world.authority.trust()
    assert (first.bundle_number, len(first.trusted), issued.bundle) == (2, 1, first.bundle)
    # 2. A second one is trusted and issues nothing. A third one is refused.
    assert await world.authority.add_authority() == 2
    both = await world.authority.trust()
    assert (both.bundle_number, len(both.trusted), both.issuing.number) == (3, 2, 1)
    with pytest.raises(InvalidRequest, match="two is the limit"):
        await world.authority.add_authority()
    # 3. It does not issue before the member trusts it.
    with pytest.raises(InvalidRequest, match=f"1 members do not trust authority 2 yet.*{issued.identity.id}"):
        await world.authority.switch_authority()
    issued = await world.renew(issued, key, key)
    assert issued.bundle_number == 3 and issued.bundle.count(b"BEGIN") == 2
    issued.certificate.verify_directly_issued_by(first.issuing.certificate)
    # 4. It issues. The old one stays trusted, and signs nothing more.
    switched = await world.authority.switch_authority()
    assert (switched.issuing.number, switched.oldest.number, switched.bundle_number) == (2, 1, 3)
    renewed = await world.renew(issued, key, key)
    renewed.certificate.verify_directly_issued_by(both.authorities[1].certificate)
    with pytest.raises(InvalidRequest, match="no authority was added"):
        await world.authority.switch_authority()
    # 5. It has left when its last certificate has expired, and its key is deleted.
    world.pass_hours(24.1)
    last = await world.authority.trust()
    assert ([each.number for each in last.trusted], last.bundle_number) == ([2], 4)
    await world.authority.clean()
    (old, _) = (await world.authority.trust()).authorities
    assert old.sealed_key is None
    # 6. Its last certificate still renews, by the new one.
    again = await world.renew(issued, key)
    again.certificate.verify_directly_issued_by(both.authorities[1].certificate)


async def test_a_clock_that_was_ahead_for_a_while_brings_no_authority_back(world: World) -> None:
    key = new_key()
    for rotation in (1, 2):
        await world.authority.add_authority()
        await world.authority.switch_authority(force=True)
        if rotation == 1:
            world.pass_hours(24.1)
            issued = await world.join(key)  # trusts authority 2 alone
    world.pass_hours(-24.1)
    trust = await world.authority.trust()
    assert ([each.number for each in trust.trusted], trust.bundle_number) == ([2, 3], 5)
    assert (await world.renew(issued, key, key)).bundle_number == 5
    token = await world.authority.new_token("kv", 60, 1, ("127.0.0.1:1",))
    assert JoinToken.parse(token.text).authorities == token.authorities


async def test_an_authority_whose_key_was_deleted_while_the_clock_was_ahead_has_left(world: World) -> None:
    gateway = await world.authority.issue_gateway(new_key().public_key(), "a host")
    await world.authority.add_authority()
    await world.authority.switch_authority(force=True)
    world.pass_hours(24.1)
    await world.authority.clean()
    world.pass_hours(-24.1)
    key = new_key()
    issued = await world.authority.issue_again(gateway.identity, key.public_key(), by_oldest=True)
    issued.certificate.verify_directly_issued_by((await world.authority.trust()).issuing.certificate)


async def test_a_member_that_sleeps_can_be_left_behind(world: World) -> None:
    await world.join()
    await world.authority.add_authority()
    assert (await world.authority.switch_authority(force=True)).issuing.number == 2
    assert await world.authority.remove_old_authority() == 1
    assert [each.number for each in (await world.authority.trust()).trusted] == [2]
    with pytest.raises(InvalidRequest, match="only one authority issues"):
        await world.authority.remove_old_authority()


async def test_a_stolen_key_of_an_authority_that_has_left_signs_nothing_of_use(world: World) -> None:
    trust = await world.authority.trust()
    assert trust.issuing.sealed_key is not None
    stolen = unseal(trust.issuing.sealed_key, trust.issuing.certificate, SECRET)
    key = new_key()
    victim = (await world.join(key)).identity
    await world.authority.add_authority()
    await world.authority.switch_authority(force=True)
    await world.authority.remove_old_authority()
    mine, request = new_key(), request_of(new_key())
    now_ms = world.database.now_ms()
    forged = process_certificate(trust.issuing.certificate, stolen, victim, mine.public_key(), now_ms, 3600)
    with pytest.raises(Unauthenticated, match="trusted no more, and not in its records"):
        await world.authority.renew(der(forged), request, proof(mine, request))


@on_both
async def test_rows_that_nothing_needs_are_deleted(world: World) -> None:
    issued = await world.join()
    await world.authority.revoke(issued.identity)
    world.pass_hours(24 * 40)
    key = new_key()
    kept = await world.join(key)
    await world.authority.clean()
    assert [member.identity for member in await world.authority.members()] == [kept.identity]
    async with world.database.each() as connection:
        assert await connection.scalar(sa.select(sa.func.count()).select_from(certificates)) == 1
        assert await connection.scalar(sa.select(sa.func.count()).select_from(authorities)) == 1
