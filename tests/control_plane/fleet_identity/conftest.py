"""Runs tests of the fleet's identity on SQLite, those that say so on PostgreSQL too, each on an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.fleet_identity.certificate_authority import CertificateAuthority
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tests.control_plane.fleet_identity.world import SECRET, World
from tests.control_plane.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database: SQLite, unless a test is `on_both`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path}/tandem.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest_asyncio.fixture
async def open_world(url: str, tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    """Return a function that makes another gateway's authority on the same database, not yet open."""
    made: list[World] = []

    def make(secret: bytes = SECRET, **options: float) -> World:
        database = Database(database_url(url, tmp_path))
        made.append(World(database, CertificateAuthority(database, secret, **options)))
        return made[-1]

    yield make
    for each in made:
        await each.database.close()


@pytest_asyncio.fixture
async def world(open_world: Callable[..., World]) -> World:
    opened = open_world()
    await migrate(opened.database)
    await opened.authority.open()
    return opened


@pytest_asyncio.fixture
async def make_empty(tmp_path: Path) -> AsyncIterator[Callable[[bytes], World]]:
    """Return a function that makes a gateway's authority on a new SQLite database."""
    made: list[World] = []

    def make(secret: bytes) -> World:
        database = Database(database_url(f"sqlite:///{tmp_path}/empty-{len(made)}.db", tmp_path))
        made.append(World(database, CertificateAuthority(database, secret)))
        return made[-1]

    yield make
    for each in made:
        await each.database.close()
