"""Runs tests of accounts on SQLite and on PostgreSQL, each test on an empty database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.accounts.service import Accounts
from control_plane.storage.database import database_url
from tests.control_plane.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tandem.db"
    made: str = request.getfixturevalue("postgres_url")
    return made


@pytest_asyncio.fixture
async def open_accounts(url: str, tmp_path: Path) -> AsyncIterator[Callable[[], Accounts]]:
    """Return a function that makes another gateway's accounts on the same database, not yet open."""
    made: list[Accounts] = []

    def make() -> Accounts:
        made.append(Accounts(database_url(url, tmp_path)))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest_asyncio.fixture
async def accounts(open_accounts: Callable[[], Accounts]) -> Accounts:
    opened = open_accounts()
    await opened.open()
    return opened
