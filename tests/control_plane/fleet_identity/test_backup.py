"""A backup brings the same fleet back on another database and under another secret, and revives nobody."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.fleet_identity import backup as module
from control_plane.fleet_identity.backup import MAGIC, backup, restore
from control_plane.fleet_identity.denials import DenyListReader
from control_plane.storage.migrate import migrate
from tandem_runtime.errors import InvalidRequest, Unauthenticated
from tests.control_plane.fleet_identity.world import SECRET, World, new_key, on_both

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCRYPT", {"n": 2**10, "r": 8, "p": 1})


async def test_the_key_of_a_backup_is_dear(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module._SCRYPT["n"] * module._SCRYPT["r"] * 128 >= 128 * 2**20
    fleet = await backup(world.database, SECRET, PASSPHRASE, tmp_path / "fleet")
    assert await restore(world.database, SECRET, PASSPHRASE, tmp_path / "fleet", replace=True) == fleet


@on_both
async def test_a_fleet_comes_back_on_another_database_under_another_secret(
    world: World, tmp_path: Path, make_empty: Callable[[bytes], World]
) -> None:
    # 1. Two members; one is revoked before the backup.
    key, other = new_key(), new_key()
    issued, revoked = await world.join(key), await world.join(other)
    await world.authority.revoke(revoked.identity)
    await world.authority.add_authority()
    path = tmp_path / "fleet"
    fleet = await backup(world.database, SECRET, PASSPHRASE, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert fleet.encode() not in path.read_bytes()
    # 2. One joins after it.
    late_key = new_key()
    late = await world.join(late_key)
    # 3. It is restored elsewhere: same authorities, same members.
    new = make_empty(b"\x09" * 32)
    await migrate(new.database)
    assert await restore(new.database, b"\x09" * 32, PASSPHRASE, path) == fleet
    trust, before = await new.authority.open(), await world.authority.trust()
    assert (trust.bundle, trust.bundle_number) == (before.bundle, before.bundle_number)
    assert {each.identity for each in await new.authority.members()} == {issued.identity, revoked.identity}
    # 4. Certificates renew, that of the late one too; the revoked one does not.
    assert (await new.renew(issued, key)).identity == issued.identity
    assert (await new.renew(late, late_key)).identity == late.identity
    with pytest.raises(Unauthenticated, match="is revoked"):
        await new.renew(revoked, other)
    # 5. Processes that have heard of later denials get all of them, and new ones.
    reader = DenyListReader(new.database)
    await reader.refresh()
    assert list(reader.since(5).ids) == [revoked.identity.id]
    heard = reader.number
    await new.authority.revoke(late.identity)
    await reader.refresh()
    assert list(reader.since(heard).ids) == [late.identity.id]


@on_both
async def test_a_fleet_that_exists_is_replaced_only_when_told(world: World, tmp_path: Path) -> None:
    path, key = tmp_path / "fleet", new_key()
    issued = await world.join(key)
    fleet = await backup(world.database, SECRET, PASSPHRASE, path)
    await world.authority.revoke(issued.identity)
    with pytest.raises(InvalidRequest, match=f"has the fleet {fleet}.*--replace"):
        await restore(world.database, SECRET, PASSPHRASE, path)
    assert await restore(world.database, SECRET, PASSPHRASE, path, replace=True) == fleet
    with pytest.raises(Unauthenticated, match="is revoked"):  # although it was revoked after the backup
        await world.renew(issued, key)


async def test_a_file_that_does_not_open_changes_nothing(world: World, tmp_path: Path) -> None:
    path = tmp_path / "fleet"
    await backup(world.database, SECRET, PASSPHRASE, path)
    raw = path.read_bytes()
    before = (await world.authority.trust()).bundle
    with pytest.raises(InvalidRequest, match="the passphrase does not open"):
        await restore(world.database, SECRET, "another passphrase", path, replace=True)
    for wrong, reason in (
        (raw[:-1] + bytes([raw[-1] ^ 1]), "or the file was changed"),
        (raw[: len(MAGIC) + 20], "or the file was changed"),
        (raw[: len(MAGIC) + 30], "or the file was changed"),
        (b"something else", "is not a backup of a fleet"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(InvalidRequest, match=reason):
            await restore(world.database, SECRET, PASSPHRASE, path, replace=True)
    with pytest.raises(InvalidRequest, match="cannot read the backup"):
        await restore(world.database, SECRET, PASSPHRASE, tmp_path / "none", replace=True)
    assert (await world.authority.trust()).bundle == before


async def test_a_backup_overwrites_no_file_and_needs_a_long_passphrase(world: World, tmp_path: Path) -> None:
    (tmp_path / "fleet").write_text("mine")
    with pytest.raises(InvalidRequest, match="name a file that does not exist"):
        await backup(world.database, SECRET, PASSPHRASE, tmp_path / "fleet")
    assert (tmp_path / "fleet").read_text() == "mine"
    with pytest.raises(InvalidRequest, match="has 5 characters, must have at least 12"):
        await backup(world.database, SECRET, "short", tmp_path / "new")
    assert not (tmp_path / "new").exists()
