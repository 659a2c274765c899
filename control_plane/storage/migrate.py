"""Migrates an empty database, or the tables of an older version, to this version."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.storage.database import Database
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger

log = get_logger(__name__)

HEAD = "0005"
"""The newest revision in migrations/versions."""

_LOCK_KEY = 0x74616E64656D  # "tandem"
_VERSIONS = sa.table("alembic_version", sa.column("version_num"))


async def migrate(database: Database) -> None:
    """Migrate the tables to `HEAD`. If several processes start at once, one migrates and the others wait.

    The migration is one transaction: a process that is killed during it has changed nothing. Raise InvalidRequest for
    tables of a newer version, Unavailable if the database cannot be reached.
    """
    async with database.begin() as connection:
        if not database.is_sqlite:  # on SQLite, BEGIN IMMEDIATE is the lock
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
        found = await _revision(connection)
        if found == HEAD:
            return
        if found is not None and found > HEAD:
            raise InvalidRequest(
                f"the database is at revision {found}, this version needs {HEAD}; start the newer version again, or "
                "set --database-url to another database"
            )
        await connection.run_sync(_upgrade)
    log.info("database_migrated", before=found or "empty", revision=HEAD)


async def _revision(connection: AsyncConnection) -> str | None:
    """Return the revision of the tables; None for an empty database."""
    has_versions = await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version"))
    return await connection.scalar(sa.select(_VERSIONS.c.version_num)) if has_versions else None


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # saves 0.2 s for processes that need no migration
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
