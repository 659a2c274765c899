"""Migration creates the tables from nothing, once, when several processes start at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import control_plane.storage
from control_plane.accounts.service import Accounts
from control_plane.storage import migrate
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import metadata
from tandem_runtime.errors import InvalidRequest


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(Path(control_plane.storage.__file__).parent / "migrations"))
    return ScriptDirectory.from_config(config)


def test_the_head_is_the_newest_revision_and_revisions_sort_by_name() -> None:
    assert scripts().get_heads() == [migrate.HEAD]
    names = [script.revision for script in scripts().walk_revisions()]
    assert names == sorted(names, reverse=True), "migrate() compares revisions by name"


async def test_of_several_that_start_at_once_each_finds_the_tables(open_accounts: Callable[[], Accounts]) -> None:
    gateways = [open_accounts() for _ in range(5)]
    await asyncio.gather(*(gateway.open() for gateway in gateways))
    async with gateways[0].database.each() as connection:
        versions = (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).scalars().all()
    assert versions == [migrate.HEAD]
    await gateways[0].store.create("me")
    assert all([await gateway.store.exists_any() for gateway in gateways])


async def test_the_migrations_make_the_tables_that_the_code_knows(accounts: Accounts) -> None:
    async with accounts.database.each() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), metadata)
        )
    assert differences == []


async def test_a_migration_that_breaks_leaves_nothing(
    open_accounts: Callable[[], Accounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = migrate._upgrade

    def broken(connection: sa.Connection) -> None:
        upgrade(connection)
        raise RuntimeError("killed")

    accounts = open_accounts()
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "_upgrade", broken)
        with pytest.raises(RuntimeError):
            await accounts.open()
    async with accounts.database.each() as connection:
        assert await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names()) == []
    await accounts.open()
    assert not await accounts.store.exists_any()


async def test_tables_of_a_newer_version_are_refused(accounts: Accounts) -> None:
    async with accounts.database.begin() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InvalidRequest, match="at revision 9999, this version needs"):
        await accounts.open()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://x/y", "names mysql"),
        ("no url", "is not a URL"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_databases_that_we_do_not_know_are_refused(url: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=why):
        database_url(url, tmp_path)


async def test_a_database_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    accounts = Accounts(database_url("postgresql://me:sesame@127.0.0.1:1/x", tmp_path))
    with pytest.raises(InvalidRequest, match=r"me:\*\*\*@127.0.0.1:1/x cannot be used.*--database-url") as refusal:
        await accounts.open()
    assert "sesame" not in refusal.value.message
    assert "sesame" not in Database(database_url("postgresql://me:sesame@127.0.0.1:1/x", tmp_path)).name
