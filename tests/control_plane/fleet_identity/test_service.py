"""A gateway opens the fleet; this machine's processes join by files, keep their certificates, and survive restarts."""

from __future__ import annotations

import asyncio
import errno
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from control_plane.fleet_identity.service import LOCAL_ROLES, FleetIdentity, IdentityOptions
from control_plane.storage.migrate import migrate
from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.files import folder_version, read_certificate
from tandem_runtime.certificates.names import identity_of
from tandem_runtime.enrolment.join_token import JoinToken
from tandem_runtime.enrolment.keeper import CertificateKeeper, token_from_file
from tandem_runtime.errors import InvalidRequest, Unauthenticated, Unavailable
from tests.control_plane.fleet_identity.world import SECRET, World


@asynccontextmanager
async def gateway(world: World, folder: Path) -> AsyncIterator[FleetIdentity]:
    await migrate(world.database)
    options = IdentityOptions("127.0.0.1:0", folder / "gateway", folder / "join")
    fleet = FleetIdentity(world.database, SECRET, options)
    await fleet.open()
    try:
        yield fleet
    finally:
        await fleet.close()


async def test_processes_of_the_machine_join_by_files_that_appear(
    make_empty: Callable[[bytes], World], tmp_path: Path
) -> None:
    waiting = asyncio.create_task(token_from_file(tmp_path / "join" / "decode", 30))
    async with gateway(make_empty(SECRET), tmp_path) as fleet:
        token = await waiting
        assert token.addresses == (fleet.enrolment_address,)
        keeper = CertificateKeeper(tmp_path / "decode", "decode", host="here")
        identity = await keeper.open(token)
        files = await asyncio.to_thread(read_certificate, tmp_path / "decode")
        assert identity_of(files.certificate) == identity and identity.role == "decode"
        assert (await CertificateKeeper(tmp_path / "kv", "kv").open(read(tmp_path / "join" / "kv"))).role == "kv"
        modes = {stat.S_IMODE((tmp_path / "join" / role).stat().st_mode) for role in LOCAL_ROLES}
        assert modes == {0o600} and stat.S_IMODE((tmp_path / "join").stat().st_mode) == 0o700
        assert fleet.identity == identity_of(
            (await asyncio.to_thread(read_certificate, tmp_path / "gateway")).certificate
        )
        assert {member.identity.role for member in await fleet.authority.members()} == {"gateway", "decode", "kv"}


async def test_a_file_that_an_earlier_gateway_left_is_read_again(
    make_empty: Callable[[bytes], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_runtime.enrolment.keeper._TRY_SECONDS_WITH_FILE", 0.2)
    async with gateway(make_empty(SECRET), tmp_path) as earlier:
        first = await CertificateKeeper(tmp_path / "other", "decode").open_with_file(tmp_path / "join" / "decode")
        assert first.fleet == earlier.identity.fleet
    starting = CertificateKeeper(tmp_path / "decode", "decode")
    waiting = asyncio.create_task(starting.open_with_file(tmp_path / "join" / "decode"))
    async with gateway(make_empty(SECRET), tmp_path) as fleet:
        assert (await waiting).fleet == fleet.identity.fleet != first.fleet
    with pytest.raises(Unavailable, match="cannot connect"):
        await CertificateKeeper(tmp_path / "third", "decode").open_with_file(tmp_path / "join" / "decode", 0.1)


async def test_a_process_that_starts_again_keeps_its_identity(
    make_empty: Callable[[bytes], World], tmp_path: Path
) -> None:
    async with gateway(make_empty(SECRET), tmp_path) as fleet:
        token, folder = read(tmp_path / "join" / "decode"), tmp_path / "decode"
        identity = await CertificateKeeper(folder, "decode").open(token)
        version = folder_version(folder)
        assert await CertificateKeeper(folder, "decode").open(None) == identity
        assert folder_version(folder) == version, "it was valid: nobody was asked"
        # It slept for 26 hours: it renews before it serves.
        late = CertificateKeeper(folder, "decode", clock=lambda: fleet.authority._database.now() + 26 * 3600)
        assert await late.open(None) == identity
        assert folder_version(folder) != version
        # Another role is another process.
        other = await CertificateKeeper(folder, "kv").open(read(tmp_path / "join" / "kv"))
        assert other.role == "kv" and other.id != identity.id
        # Revoked in between: it joins as a new member, if it has a token.
        await fleet.authority.revoke(other)
        again = CertificateKeeper(folder, "kv", clock=lambda: fleet.authority._database.now() + 26 * 3600)
        with pytest.raises(Unauthenticated, match=r"is revoked and gets no certificate.*fleet token --role kv"):
            await again.open(None)
        assert (await again.open(read(tmp_path / "join" / "kv"))).id != other.id


async def test_a_process_renews_in_time_and_with_each_new_authority(
    make_empty: Callable[[bytes], World], tmp_path: Path
) -> None:
    world, now = make_empty(SECRET), [0.0]
    async with gateway(world, tmp_path) as fleet:
        folder = tmp_path / "decode"
        keeper = CertificateKeeper(folder, "decode", clock=lambda: world.database.now() + now[0])
        identity = await keeper.open(read(tmp_path / "join" / "decode"))
        versions = [folder_version(folder)]

        async def checked() -> str:
            await keeper.check()
            versions.append(folder_version(folder))
            return versions[-1]

        assert await checked() == versions[0]
        now[0] = 11.9 * 3600
        assert await checked() == versions[0]
        now[0] = 12.1 * 3600
        assert await checked() not in versions[:-1], "half of its life has passed"
        now[0] = 0.0
        keeper.announced(2)
        assert await checked() == versions[-2]
        await fleet.authority.add_authority()
        await fleet.certificate.check()
        assert fleet.bundle_number == 3
        keeper.announced(fleet.bundle_number)
        assert await checked() not in versions[:-1]
        files = await asyncio.to_thread(read_certificate, folder)
        assert files.bundle.count(b"BEGIN") == 2 and identity_of(files.certificate) == identity
        assert await checked() == versions[-2]
        keeper.announced(fleet.bundle_number + 1)
        assert await checked() not in versions[:-1], "a gateway whose clock is ahead says so"
        assert await checked() == versions[-2], "and there is no such bundle"


async def test_a_process_uses_a_renewed_certificate_that_the_disk_does_not_take(
    make_empty: Callable[[bytes], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(make_empty(SECRET), tmp_path) as fleet:
        folder = tmp_path / "decode"
        keeper = CertificateKeeper(folder, "decode")
        await keeper.open(read(tmp_path / "join" / "decode"))
        certificate = ProcessCertificate(lambda: keeper.files, lambda: keeper.version)
        await fleet.authority.add_authority()
        await fleet.certificate.check()
        keeper.announced(fleet.bundle_number)
        before = await asyncio.to_thread(read_certificate, folder)
        with monkeypatch.context() as full:
            full.setattr("tandem_runtime.enrolment.keeper.write_certificate", _disk_is_full)
            await keeper.check()
            renewed = keeper.files
            assert certificate.refresh() and len(certificate.current.authorities) == 2
            assert await asyncio.to_thread(read_certificate, folder) == before
            await keeper.check()
        await keeper.check()
        assert keeper.files == renewed, "it was written, not renewed once more"
        assert await asyncio.to_thread(read_certificate, folder) == renewed
        assert not certificate.refresh()


async def test_a_certificate_by_a_clock_that_was_ahead_is_renewed_in_time(
    make_empty: Callable[[bytes], World], tmp_path: Path
) -> None:
    """Servers close what a certificate has open once its life is over by the seconds that passed since it was shown."""
    seconds = [1000.0]
    async with gateway(make_empty(SECRET), tmp_path):
        keeper = CertificateKeeper(tmp_path / "decode", "decode", clock=lambda: noon, elapsed=lambda: seconds[0])
        noon = time.time()
        await keeper.open(read(tmp_path / "join" / "decode"))
        noon -= 3600.0  # the process and its gateway were an hour ahead
        first = keeper.files
        seconds[0] += 11.9 * 3600
        await keeper.check()
        assert keeper.files == first
        seconds[0] += 0.2 * 3600
        await keeper.check()
        assert keeper.files != first


async def test_a_refused_process_asks_again_soon_if_no_gateway_answers(
    make_empty: Callable[[bytes], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_runtime.enrolment.keeper._TRY_SECONDS", 0.2)
    world = make_empty(SECRET)
    async with gateway(world, tmp_path):
        keeper = CertificateKeeper(tmp_path / "decode", "decode")
        await keeper.open(read(tmp_path / "join" / "decode"))
        first = keeper.files
        address = keeper._addresses
        keeper._addresses = ("127.0.0.1:9",)  # nobody listens
        keeper.doubted()
        await keeper.check()
        keeper._addresses = address
        assert keeper.files == first
        await keeper.check()
        assert keeper.files != first


def _disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_process_that_cannot_renew_keeps_what_it_has(
    make_empty: Callable[[bytes], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, now, folder = make_empty(SECRET), [0.0], tmp_path / "decode"
    monkeypatch.setattr("tandem_runtime.enrolment.keeper._TRY_SECONDS", 0.2)
    async with gateway(world, tmp_path) as fleet:
        keeper = CertificateKeeper(folder, "decode", clock=lambda: world.database.now() + now[0])
        identity = await keeper.open(read(tmp_path / "join" / "decode"))
        version = folder_version(folder)
        await fleet.authority.revoke(identity)
        now[0] = 13 * 3600
        await keeper.check()
        assert "is revoked" in keeper._problem
    other = CertificateKeeper(folder, "decode", clock=lambda: world.database.now() + now[0])
    assert await other.open(None, seconds=0.2) == identity, "it is valid for 11 hours more"
    now[0] = 25 * 3600
    with pytest.raises(Unavailable, match="cannot connect"):
        await other.open(None, seconds=0.2)
    await other.check()
    assert "cannot connect" in other._problem and folder_version(folder) == version


async def test_a_token_that_never_appears_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no join token in .*decode after 0 s"):
        await token_from_file(tmp_path / "decode", 0)
    (tmp_path / "decode").mkdir()
    with pytest.raises(InvalidRequest, match="cannot read the join token"):
        await token_from_file(tmp_path / "decode", 0)


async def test_a_secret_of_another_fleet_opens_nothing(make_empty: Callable[[bytes], World], tmp_path: Path) -> None:
    world = make_empty(SECRET)
    async with gateway(world, tmp_path) as fleet:
        address = fleet.enrolment_address
    other = FleetIdentity(world.database, b"\x01" * 32, IdentityOptions("127.0.0.1:0", tmp_path / "other"))
    with pytest.raises(InvalidRequest, match="the secret of this control plane does not open"):
        await other.open()
    await other.close()
    assert other.enrolment_address == "" and address
    assert not (tmp_path / "other").exists()


def read(path: Path) -> JoinToken:
    return JoinToken.parse(path.read_text())
