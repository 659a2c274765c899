"""Gateways that share a database enforce a limit exactly, under concurrency, cancellation and crashes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import sqlalchemy as sa

from control_plane.accounts.errors import LimitReached
from control_plane.accounts.limiter import Admission, Limiter
from control_plane.accounts.limits import Limits, Window
from control_plane.accounts.service import Accounts
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import windows
from tandem_runtime.errors import Unavailable
from tests.control_plane.postgres import Postgres


@pytest_asyncio.fixture
async def limiters(accounts: Accounts, url: str, tmp_path: object) -> AsyncIterator[list[Limiter]]:
    """Of two gateways with a connection pool each."""
    databases = [Database(database_url(url, None)) for _ in range(2)]  # type: ignore[arg-type]
    yield [Limiter(database, f"gateway-{index}") for index, database in enumerate(databases)]
    for database in databases:
        await database.close()


async def try_all(limiters: list[Limiter], limits: Limits, num: int, num_tokens: int = 1) -> list[Admission]:
    """Ask `num` times at once at each gateway; returns the admissions."""
    admissions = [limiter.admit("me", limits, num_tokens) for _ in range(num) for limiter in limiters]
    answers = await asyncio.gather(*admissions, return_exceptions=True)
    unexpected = [answer for answer in answers if not isinstance(answer, Admission | LimitReached)]
    assert not unexpected, unexpected
    return [answer for answer in answers if isinstance(answer, Admission)]


async def stored(accounts: Accounts) -> Window:
    async with accounts.database.each() as connection:
        state = await connection.scalar(sa.select(windows.c.state).where(windows.c.account == "me"))
    return Window.decode(str(state))


async def test_of_many_at_two_gateways_exactly_the_limit_is_admitted(
    limiters: list[Limiter], accounts: Accounts
) -> None:
    admitted = []
    for _ in range(4):
        admitted += await try_all(limiters, Limits(max_requests_per_minute=130), 25)
    assert len(admitted) == 130
    assert (await stored(accounts)).num_requests == 130
    remaining = sorted(admission.requests.remaining for admission in admitted if admission.requests)
    assert remaining[0] == 0


async def test_tokens_and_concurrency_are_shared_and_given_back(limiters: list[Limiter], accounts: Accounts) -> None:
    limits = Limits(max_tokens_per_minute=1000, max_concurrent_requests=7)
    admitted = await try_all(limiters, limits, 10, num_tokens=100)
    assert len(admitted) == 7
    for index, admission in enumerate(admitted):
        owner = limiters[index % 2]
        owner.settle(admission, 10)
    for limiter in limiters:
        await limiter.drain()
    window = await stored(accounts)
    assert (window.num_requests, window.num_tokens) == (7, 70)
    assert len(await try_all(limiters, limits, 10, num_tokens=310)) == 3


async def test_gateways_take_off_only_what_they_have_counted_themselves(
    limiters: list[Limiter], accounts: Accounts
) -> None:
    limits = Limits(max_concurrent_requests=10)
    for limiter in limiters:
        assert len(await try_all([limiter], limits, 3)) == 3
    assert (await stored(accounts)).running == {"gateway-0": 3, "gateway-1": 3}
    await limiters[0].forget(lambda gateway: False)
    assert (await stored(accounts)).running == {"gateway-0": 3}


async def test_a_caller_who_leaves_while_being_counted_is_taken_off(
    limiters: list[Limiter], accounts: Accounts
) -> None:
    limits = Limits(max_tokens_per_minute=1000, max_concurrent_requests=5)
    callers = [asyncio.create_task(limiters[0].admit("me", limits, 100)) for _ in range(5)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await limiters[0].drain()
    await limiters[0].drain()  # what is undone comes after what was done
    window = await stored(accounts)
    assert window.running == {} and window.num_tokens == 0
    assert len(await try_all(limiters, limits, 5, num_tokens=100)) == 5


async def test_who_has_used_all_is_told_when_without_asking_the_database(
    limiters: list[Limiter], accounts: Accounts
) -> None:
    limits = Limits(max_requests_per_minute=1)
    await limiters[0].admit("me", limits, 1)
    for _ in range(2):
        with pytest.raises(LimitReached, match="me has used its 1 requests a minute") as refusal:
            await limiters[0].admit("me", limits, 1)
        assert refusal.value.retry_after_seconds and 58 < refusal.value.retry_after_seconds <= 60.5
        assert refusal.value.statuses[0] is not None and refusal.value.statuses[0].remaining == 0
        async with accounts.database.begin() as connection:
            await connection.execute(sa.delete(windows))  # the second one does not see it
    assert await limiters[0].admit("me", Limits(max_requests_per_minute=2), 1)


async def test_a_write_whose_answer_is_lost_leaves_nobody_running(
    limiters: list[Limiter], accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, limiter = Limits(max_concurrent_requests=2), limiters[0]
    running = await limiter.admit("me", limits, 1)
    book = limiter._limiter_of("me")
    swap = book._swap

    async def lost(before: str, mine: str, window: Window) -> tuple[str, Window]:
        await swap(before, mine, window)
        monkeypatch.setattr(book, "_swap", swap)
        raise Unavailable("the connection broke after the commit")

    monkeypatch.setattr("control_plane.accounts.limiter._RETRY_SECONDS", 0.0)
    monkeypatch.setattr(book, "_swap", lost)
    with pytest.raises(Unavailable, match="after the commit"):
        await limiter.admit("me", limits, 1)
    await limiter.drain()  # the window is corrected although nobody asks again
    assert (await stored(accounts)).running == {"gateway-0": 1}
    monkeypatch.setattr(book, "_swap", lost)
    limiter.settle(running, 1)
    await limiter.drain()
    assert (await stored(accounts)).running == {}
    assert len(await try_all(limiters, limits, 2)) == 2


async def test_an_outage_is_named_and_what_ended_meanwhile_is_settled_after_it(
    postgres: Postgres, postgres_url: str, tmp_path: object
) -> None:
    accounts = Accounts(database_url(postgres_url, None))  # type: ignore[arg-type]
    await accounts.open()
    limiter = Limiter(accounts.database, "gateway-0")
    limits = Limits(max_concurrent_requests=2)
    admissions = [await limiter.admit("me", limits, 1) for _ in range(2)]
    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="the database cannot be used"):
            await limiter.admit("me", limits, 1)
        limiter.settle(admissions[0], 1)
    finally:
        postgres.start()
    await asyncio.wait_for(limiter.drain(), 30)
    assert (await stored(accounts)).running == {"gateway-0": 1}
    limiter.settle(admissions[1], 1)
    await limiter.drain()
    assert (await stored(accounts)).running == {}
    await accounts.close()
