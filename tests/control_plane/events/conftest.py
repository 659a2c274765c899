"""Runs tests of events on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from control_plane.events.log import EventLog
from control_plane.events.store import EventStore
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tests.control_plane.accounts.conftest import postgres, postgres_url, url

__all__ = ["postgres", "postgres_url", "url"]

NOW_MS = 1_700_000_000_000
NewLog = Callable[..., EventLog]


@pytest_asyncio.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = Database(database_url(url, Path()))
    await migrate(opened)
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def other_database(url: str, database: Database) -> AsyncIterator[Database]:
    """Another gateway's connection to the same database."""
    opened = Database(database_url(url, Path()))
    yield opened
    await opened.close()


def store_of(database: Database, *, days: float = 36_500.0, max_rows: int = 1_000_000) -> EventStore:
    return EventStore(database, days, max_rows)


async def opened_log(database: Database, gateway: str = "g1", **store: float) -> EventLog:
    log = EventLog(gateway, lambda: NOW_MS)
    await log.open(store_of(database, **store))  # type: ignore[arg-type]
    return log
