"""How do the tables of an older version, or none at all, become those of this one?"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.storage.database import Database
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.log import get_logger

log = get_logger(__name__)

HEAD = "0001"
"""The newest revision in migrations/versions."""

_LOCK_KEY = 0x74616E64656D  # "tandem"
_VERSIONS = sa.table("alembic_version", sa.column("version_num"))


async def migrate(database: Database) -> None:
    """Bring the tables to `HEAD`; of several processes that start at once one does it, the others wait.

    It is one transaction: a process that is killed in the middle has changed nothing. Raises InvalidRequest for tables
    of a newer version, Unavailable if the database cannot be reached.
    """
    async with database.begin() as connection:
        if not database.is_sqlite:  # there BEGIN IMMEDIATE is the lock
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
        found = await _revision(connection)
        if found == HEAD:
            return
        if found is not None and found > HEAD:
            raise InvalidRequest(
                f"the database is at revision {found}, this version knows {HEAD}; start the newer version again, or "
                "give --database-url another database"
            )
        await connection.run_sync(_upgrade)
    log.info("database_migrated", before=found or "empty", revision=HEAD)


async def _revision(connection: AsyncConnection) -> str | None:
    """Return the revision that the tables have; None for an empty database."""
    has_versions = await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version"))
    return await connection.scalar(sa.select(_VERSIONS.c.version_num)) if has_versions else None


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # a fifth of a second, for processes that find the tables as they must be
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
