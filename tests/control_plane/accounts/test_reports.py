"""A report of usage delays and refuses nobody else, however long it takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.accounts.service import Accounts
from control_plane.accounts.usage import Period, today
from control_plane.storage.database import Database, database_url
from tandem_runtime.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.control_plane.api.gateway import serve

ENDLESS = {
    True: "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
    False: "SELECT pg_sleep(600)",
}


@asynccontextmanager
async def opened(url: str, report_seconds: float) -> AsyncIterator[Accounts]:
    accounts = Accounts(database_url(url, None), report_seconds=report_seconds)  # type: ignore[arg-type]
    await accounts.open()
    try:
        yield accounts
    finally:
        await accounts.close()


async def endless_report(database: Database, started: asyncio.Event | None = None) -> None:
    loop = asyncio.get_running_loop()

    def read(connection: sa.Connection) -> None:
        if started is not None:
            loop.call_soon_threadsafe(started.set)
        connection.execute(sa.text(ENDLESS[database.is_sqlite])).all()

    await database.report(read)


async def test_a_report_that_is_too_slow_is_ended_and_refuses_nobody_else(url: str) -> None:
    """Finding 20: the next caller was refused, and /readyz failed."""
    async with opened(url, report_seconds=0.2) as accounts:
        for _ in range(4):
            with pytest.raises(DeadlineExceeded, match=r"the report took longer than 0\.2 s.*ask for fewer days"):
                await endless_report(accounts.database)
            accounts.database.check()
            assert accounts.database.problem == ""
        await accounts.store.create("me")
        assert await accounts.usage.page(Period(today(), today()), "me", None, 0, 10) == ([], 0)


async def test_requests_and_the_ledger_go_on_while_reports_run(url: str) -> None:
    async with opened(url, report_seconds=2.0) as accounts:
        started = [asyncio.Event(), asyncio.Event()]
        reports = [asyncio.create_task(endless_report(accounts.database, event)) for event in started]
        await started[0].wait()
        for number in range(20):
            await accounts.store.create(f"account-{number}")
        assert not any(report.done() for report in reports), "twenty transactions did not wait for a report"
        results = await asyncio.gather(*reports, return_exceptions=True)
        assert [type(result) for result in results] == [DeadlineExceeded, DeadlineExceeded]


async def test_reports_wait_for_each_other_and_not_for_ever(url: str) -> None:
    async with opened(url, report_seconds=0.3) as accounts:
        results = await asyncio.gather(*(endless_report(accounts.database) for _ in range(5)), return_exceptions=True)
    kinds = {type(result) for result in results}
    assert kinds <= {DeadlineExceeded, Overloaded} and DeadlineExceeded in kinds


async def test_a_slow_report_is_a_408_with_its_remedy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url, report_seconds=0.2) as accounts:
        report = accounts.database.report

        async def slow(work: Any) -> Any:
            return await report(
                lambda connection: connection.execute(sa.text(ENDLESS[accounts.database.is_sqlite])).all()
            )

        monkeypatch.setattr(accounts.database, "report", slow)
        async with serve(accounts=accounts) as gateway:
            answer = await gateway.client.get("/client/v4/accounts/default/ai/usage?from=0001-01-01")
            assert answer.status_code == 408
            assert "ask for fewer days" in answer.json()["errors"][0]["message"]
            assert (await gateway.client.get("/readyz")).status_code == 200


async def test_a_statement_that_is_slow_is_no_outage_until_several_in_a_row_are(postgres_url: str) -> None:
    async with opened(postgres_url, report_seconds=1.0) as accounts:
        database = accounts.database

        async def slow() -> None:
            with pytest.raises(Unavailable):
                async with database.begin() as connection:
                    await connection.execute(sa.text("SET LOCAL statement_timeout = 20"))
                    await connection.execute(sa.text("SELECT pg_sleep(60)"))

        for _ in range(2):
            await slow()
            database.check()
        await accounts.store.create("me")  # one that is answered: the database is there
        for _ in range(2):
            await slow()
            database.check()
        await slow()
        with pytest.raises(Unavailable, match="could not be reached"):
            database.check()
        assert database.problem


async def test_a_conflict_of_two_statements_is_no_outage(postgres_url: str) -> None:
    async with opened(postgres_url, report_seconds=1.0) as accounts:
        database = accounts.database
        await accounts.store.create("me")
        read, written = sa.text("SELECT * FROM accounts"), sa.text("UPDATE accounts SET disabled_ms = 1")
        isolation = sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(Unavailable):
            async with database.begin() as first:
                await first.execute(isolation)
                await first.execute(read)
                async with database.begin() as second:
                    await second.execute(written)
                await first.execute(written)  # 40001: could not serialize access
        database.check()
        assert database.problem == ""


async def test_sqlite_has_no_thread_left_after_a_report(tmp_path: Any) -> None:
    before = set(threading.enumerate())
    async with opened(f"sqlite:///{tmp_path}/tandem.db", report_seconds=0.1) as accounts:
        with pytest.raises(DeadlineExceeded):
            await endless_report(accounts.database)
    left = [thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    for thread in left:  # a driver's thread may end a moment after its connection
        await asyncio.to_thread(thread.join, 10.0)
    assert [thread.name for thread in left if thread.is_alive()] == [], "asyncio's own threads end with the loop"
