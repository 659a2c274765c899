"""Each request gets one row, opened before its first token and closed once, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.accounts.incarnations import Incarnations
from control_plane.accounts.ledger import GATEWAY_LOST, REFUSED, Closing, Ledger, Opening
from control_plane.accounts.limiter import Limiter
from control_plane.accounts.limits import Limits, Window
from control_plane.accounts.service import Accounts
from control_plane.accounts.usage import Period, today
from control_plane.generation import PhaseWork, Usage
from control_plane.storage.database import database_url
from control_plane.storage.tables import gateways, ledger, windows
from tandem_runtime.errors import InternalError, InvalidRequest, Unavailable
from tests.control_plane.postgres import Postgres

USED = Usage(100, 60, 40, 7, PhaseWork(8, 2, 0, 4096, 1500, 2500), 123_456)


def opening(request_id: str, account: str = "me", model: str = "m") -> Opening:
    return Opening(request_id, account, "token", model, num_choices=1, num_asked_tokens=100)


async def rows(accounts: Accounts) -> dict[str, Any]:
    async with accounts.database.each() as connection:
        return {row.request_id: row for row in await connection.execute(sa.select(ledger))}


async def test_a_row_is_there_when_it_is_said_to_be_and_closed_once(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    await book.open(opening("r"))
    row = (await rows(accounts))["r"]
    assert (row.status, row.closed_ms, row.account, row.token_id, row.gateway) == ("open", None, "me", "token", "g")
    assert row.day == row.opened_ms // 86_400_000
    book.close(Closing("r", "finished", USED, "stop"))
    book.close(Closing("r", "failed", replace(USED, num_completion_tokens=0)))
    await book.drain()
    row = (await rows(accounts))["r"]
    assert (row.status, row.finish_reasons, row.error, row.num_asked_tokens) == ("finished", "stop", "", 100)
    assert (row.num_prompt_tokens, row.num_computed_tokens, row.num_cached_tokens) == (100, 60, 40)
    assert (row.num_pool_tokens, row.num_store_tokens, row.num_remote_tokens) == (30, 8, 2)
    assert (row.num_completion_tokens, row.num_bytes_moved, row.prefill_us, row.decode_us) == (7, 4096, 1500, 2500)
    assert row.microneurons == 123_456 and row.closed_ms >= row.opened_ms


async def test_many_at_once_share_transactions_and_none_is_lost(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")

    async def live(index: int) -> None:
        await book.open(opening(f"r{index}"))
        book.close(Closing(f"r{index}", "finished", USED))

    await asyncio.gather(*(live(index) for index in range(1500)))
    book.open(opening("last"))
    book.close(Closing("last", "cancelled", USED))  # in one transaction with its opening
    await book.drain()
    statuses = [row.status for row in (await rows(accounts)).values()]
    assert statuses.count("finished") == 1500 and statuses.count("cancelled") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompt_tokens": 99},
        {"num_pool_tokens": 31},
        {"num_computed_tokens": -1, "num_prompt_tokens": 39},
        {"status": "open", "closed_ms": 5},
        {"status": "finished", "closed_ms": None},
    ],
)
async def test_the_database_itself_refuses_sums_that_do_not_hold(accounts: Accounts, wrong: dict[str, Any]) -> None:
    book = Ledger(accounts.database, "g")
    await book.open(opening("r"))
    good = Closing("r", "finished", USED).values(10**13)
    with pytest.raises(IntegrityError):
        async with accounts.database.begin() as connection:
            await connection.execute(sa.update(ledger).values({**good, **wrong}))


async def test_a_row_that_is_nonsense_does_not_take_others_along(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    nonsense = replace(USED, work=PhaseWork(num_store_tokens=41))
    there = [book.open(opening(name)) for name in "abc"]
    for name, used in (("a", USED), ("b", nonsense), ("c", USED)):
        book.close(Closing(name, "finished", used))
    await asyncio.gather(*there)
    await book.drain()
    found = await rows(accounts)
    assert [(found[name].status, found[name].error) for name in "abc"] == [
        ("finished", ""),
        ("failed", REFUSED),
        ("finished", ""),
    ]
    assert found["b"].num_prompt_tokens == 0


async def test_a_closing_never_overtakes_its_opening(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    for index in range(1100):
        book.open(opening(f"r{index}"))
    for index in reversed(range(1100)):  # the first slice of closings is of the last slice of openings
        book.close(Closing(f"r{index}", "finished", USED))
    await book.drain()
    assert {row.status for row in (await rows(accounts)).values()} == {"finished"}


async def test_each_opening_is_told_what_came_of_its_own_row(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    good, nonsense = book.open(opening("good")), book.open(opening("nonsense", model=None))  # type: ignore[arg-type]
    await good
    with pytest.raises(InternalError, match="refused the request's row"):
        await nonsense
    assert set(await rows(accounts)) == {"good"}


async def test_a_value_that_the_database_cannot_hold_is_its_requests_fault_alone(
    postgres_url: str, tmp_path: Path
) -> None:
    accounts = Accounts(database_url(postgres_url, tmp_path))
    await accounts.open()
    book = Ledger(accounts.database, "g")
    there = [book.open(opening(name, account)) for name, account in (("a", "me"), ("b", "x\0"), ("c", "x" * 65))]
    await there[0]
    for refused in there[1:]:
        with pytest.raises(InvalidRequest, match="cannot hold a value"):
            await refused
    assert accounts.database.problem == "" and set(await rows(accounts)) == {"a"}
    accounts.database.check()
    await accounts.close()


async def test_one_statement_that_fails_is_no_outage(postgres_url: str, tmp_path: Path) -> None:
    accounts = Accounts(database_url(postgres_url, tmp_path))
    await accounts.open()
    for statement, kind in (("SELECT * FROM nothing", Unavailable), ("SELECT 1/0", InvalidRequest)):
        with pytest.raises(kind, match="the database cannot"):
            async with accounts.database.each() as connection:
                await connection.execute(sa.text(statement))
        accounts.database.check()
        assert accounts.database.problem == ""
    await accounts.close()


async def test_an_outage_refuses_new_rows_and_loses_no_closing(postgres: Postgres, postgres_url: str) -> None:
    accounts = Accounts(database_url(postgres_url, None))  # type: ignore[arg-type]
    await accounts.open()
    book = Ledger(accounts.database, "g")
    await asyncio.gather(*(book.open(opening(f"r{index}")) for index in range(3)))
    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="the database cannot be used"):
            await book.open(opening("new"))
        with pytest.raises(Unavailable, match="could not be reached; try again"):
            book.check()
        for index in range(3):
            book.close(Closing(f"r{index}", "finished", USED))
    finally:
        postgres.start()
    await asyncio.wait_for(book.drain(), 30)
    assert {name: row.status for name, row in (await rows(accounts)).items()} == dict.fromkeys(
        ("r0", "r1", "r2"), "finished"
    )
    await accounts.close()


async def test_a_gateway_that_dies_leaves_rows_that_another_closes_as_aborted(accounts: Accounts) -> None:
    limiters = {name: Limiter(accounts.database, name) for name in ("dead", "alive")}
    lives = {name: Incarnations(accounts.database, name, limiters[name], gone_seconds=30) for name in limiters}
    books = {name: Ledger(accounts.database, name) for name in limiters}
    for name in ("dead", "alive"):
        await lives[name].begin()
        await books[name].open(opening(f"{name}'s"))
        await limiters[name].admit("me", Limits(max_concurrent_requests=9), 1)
    await lives["alive"].sweep()
    assert {row.status for row in (await rows(accounts)).values()} == {"open"}  # not so soon

    async with accounts.database.begin() as connection:  # half a minute of silence
        seen = gateways.c.incarnation == "dead"
        await connection.execute(sa.update(gateways).where(seen).values(seen_ms=gateways.c.seen_ms - 31_000))
    await lives["alive"].sweep()
    found = await rows(accounts)
    assert (found["dead's"].status, found["dead's"].error) == ("aborted", GATEWAY_LOST)
    assert found["dead's"].closed_ms is not None and found["dead's"].num_prompt_tokens == 0
    assert found["alive's"].status == "open"
    async with accounts.database.each() as connection:
        window = Window.decode(str(await connection.scalar(sa.select(windows.c.state))))
    assert window.running == {"alive": 1}

    # It was only asleep: it says so, and its own word of what it did holds.
    await lives["dead"].beat()
    books["dead"].close(Closing("dead's", "finished", USED))
    await books["dead"].drain()
    row = (await rows(accounts))["dead's"]
    assert (row.status, row.error, row.num_prompt_tokens) == ("finished", "", 100)
    await lives["alive"].sweep()
    async with accounts.database.each() as connection:
        ended = (await connection.execute(sa.select(gateways.c.incarnation).where(gateways.c.ended_ms.is_(None)))).all()
    assert {"dead", "alive"} <= {row.incarnation for row in ended}


async def test_the_next_life_closes_what_one_long_dead_has_left(open_accounts: Callable[[], Accounts]) -> None:
    before = open_accounts()
    await before.open()
    await before.metering._ledger.open(opening("r"))
    async with before.database.begin() as connection:
        await connection.execute(sa.update(gateways).values(seen_ms=gateways.c.seen_ms - 31_000))
    after = open_accounts()
    await after.open()
    assert (await rows(after))["r"].status == "aborted"


async def test_usage_is_summed_by_day_account_and_model(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    for index, (account, model) in enumerate([("me", "a"), ("me", "a"), ("me", "b"), ("you", "a")]):
        await book.open(opening(f"r{index}", account, model))
        book.close(Closing(f"r{index}", "finished", USED))
    await book.open(opening("running"))
    await book.drain()
    async with accounts.database.begin() as connection:
        await connection.execute(sa.update(ledger).where(ledger.c.request_id == "r0").values(day=ledger.c.day - 1))
    report, day = accounts.usage, today()
    everything = Period(day.replace(year=day.year - 1), day)
    mine, total = await report.page(everything, "me", None, 0, 10)
    assert total == 3
    assert [(row["date"] == day.isoformat(), row["model"], row["requests"]) for row in mine] == [
        (False, "a", 1),
        (True, "a", 1),
        (True, "b", 1),
    ]
    assert mine[0] == {
        "date": mine[0]["date"],
        "account": "me",
        "model": "a",
        "requests": 1,
        "prompt_tokens": 100,
        "computed_tokens": 60,
        "cached_tokens": 40,
        "completion_tokens": 7,
        "seams": 0,
        "neurons": 0.123456,
        "cost_usd": 0.000001358,
    }
    assert [row["model"] for row in (await report.page(everything, "me", None, 2, 10))[0]] == ["b"]
    assert (await report.page(everything, "me", None, 3, 10)) == ([], 3)
    assert {row["account"] for row in (await report.page(everything, None, "a", 0, 10))[0]} == {"me", "you"}
    assert len((await report.page(Period(day, day), "me", None, 0, 10))[0]) == 2
