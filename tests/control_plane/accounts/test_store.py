"""Accounts and tokens are stored unchanged, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.accounts.errors import AlreadyThere, NoSuchThing
from control_plane.accounts.limits import Limits
from control_plane.accounts.service import Accounts
from control_plane.accounts.tokens import digest_of, now_ms
from control_plane.storage.tables import tokens
from tandem_runtime.errors import InvalidRequest


async def test_an_account_is_made_once_and_listed(accounts: Accounts) -> None:
    store = accounts.store
    assert not await store.exists_any()
    made = await store.create("team-a", Limits(max_requests_per_minute=60))
    await store.create("Team.B_2")
    assert await store.exists_any()
    assert await store.get("team-a") == made
    assert [account.id for account in await store.all()] == ["Team.B_2", "team-a"] or [
        account.id for account in await store.all()
    ] == ["team-a", "Team.B_2"]  # collations differ
    with pytest.raises(AlreadyThere, match="team-a already"):
        await store.create("team-a")
    with pytest.raises(NoSuchThing, match="no account nobody"):
        await store.get("nobody")


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "ä", "a" * 65, "..", "a\n"])
async def test_names_that_no_url_can_hold_are_refused(accounts: Accounts, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a name for an account"):
        await accounts.store.create(name)


async def test_of_many_who_make_an_account_at_once_one_succeeds(accounts: Accounts) -> None:
    results = await asyncio.gather(*(accounts.store.create("team-a") for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Account"] + ["AlreadyThere"] * 7


async def test_a_named_limit_is_changed_and_an_account_shut(accounts: Accounts) -> None:
    await accounts.store.create("me", Limits(1, 2, 3))
    changed = await accounts.store.change("me", limits={"max_tokens_per_minute": 5}, disabled=True)
    assert changed.limits == Limits(1, 5, 3) and changed.disabled_ms is not None
    again = await accounts.store.change("me", disabled=False)
    assert again.limits == Limits(1, 5, 3) and again.disabled_ms is None
    with pytest.raises(NoSuchThing):
        await accounts.store.change("nobody", disabled=True)


@pytest.mark.parametrize("value", [0, -1, 2**31])
async def test_limits_are_numbers_that_make_sense(value: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens_per_minute"):
        Limits(max_tokens_per_minute=value)


async def test_the_secret_of_a_token_is_not_in_the_database(accounts: Accounts) -> None:
    await accounts.store.create("me")
    token, secret = await accounts.store.create_token("me", "laptop", ["inference"], now_ms() + 60_000)
    async with accounts.database.each() as connection:
        row = (await connection.execute(sa.select(tokens))).one()
    assert secret not in repr(tuple(row)) and secret.removeprefix("tdm_").encode() not in row.digest
    assert row.digest == digest_of(secret)
    holder = await accounts.store.find(row.digest)
    assert holder is not None and holder.token == token and holder.account.id == "me"
    assert await accounts.store.find(b"\0" * 32) is None


async def test_a_token_can_be_revoked_and_rolled(accounts: Accounts) -> None:
    store = accounts.store
    await store.create("me")
    token, first = await store.create_token("me", "laptop", ["inference"])
    rolled, second = await store.roll("me", token.id)
    assert rolled.id == token.id and first != second
    assert await store.find(_digest(first)) is None and await store.find(_digest(second)) is not None
    revoked = await store.revoke("me", token.id)
    assert revoked.revoked_ms is not None and await store.revoke("me", token.id) == revoked
    with pytest.raises(InvalidRequest, match="was revoked"):
        await store.roll("me", token.id)
    assert await store.tokens_of("me") == [revoked]


async def test_a_token_belongs_to_its_account_alone(accounts: Accounts) -> None:
    for name in ("me", "you"):
        await accounts.store.create(name)
    token, _ = await accounts.store.create_token("me", "laptop", ["inference"])
    for attempt in (accounts.store.token, accounts.store.revoke, accounts.store.roll):
        with pytest.raises(NoSuchThing, match="you has no token"):
            await attempt("you", token.id)
    assert (await accounts.store.token("me", token.id)).revoked_ms is None
    with pytest.raises(NoSuchThing, match="no account nobody"):
        await accounts.store.create_token("nobody", "x", ["inference"])


async def test_bad_tokens_are_not_made(accounts: Accounts) -> None:
    await accounts.store.create("me")
    bad: list[tuple[Any, ...]] = [("", ["inference"]), ("x", ["root"]), ("x", []), ("x", ["usage"], now_ms() - 1)]
    for values in bad:
        with pytest.raises(InvalidRequest):
            await accounts.store.create_token("me", *values)
    assert await accounts.store.tokens_of("me") == []


async def test_the_last_use_is_known_to_the_minute_and_never_goes_back(accounts: Accounts) -> None:
    await accounts.store.create("me")
    token, _ = await accounts.store.create_token("me", "laptop", ["inference"])
    for moment in (600_123, 660_999, 630_000):
        await accounts.store.used({token.id: moment})
    assert (await accounts.store.token("me", token.id)).used_ms == 660_000


def _digest(secret: str) -> bytes:
    digest = digest_of(secret)
    assert digest is not None
    return digest


async def test_two_changes_of_different_limits_at_once_lose_none(accounts: Accounts) -> None:
    """Finding 28: each read all limits, changed one, and wrote all."""
    await accounts.store.create("me", Limits(1, 2, 3))
    for number in range(10, 20):
        await asyncio.gather(
            accounts.store.change("me", limits={"max_requests_per_minute": number}),
            accounts.store.change("me", limits={"max_tokens_per_minute": number}),
            accounts.store.change("me", limits={"max_concurrent_requests": None}),
        )
        assert (await accounts.store.get("me")).limits == Limits(number, number, None)


async def test_a_limit_that_makes_no_sense_changes_nothing(accounts: Accounts) -> None:
    await accounts.store.create("me", Limits(1, 2, 3))
    with pytest.raises(InvalidRequest, match="max_tokens_per_minute is 0"):
        await accounts.store.change("me", limits={"max_tokens_per_minute": 0, "max_requests_per_minute": 9})
    assert (await accounts.store.get("me")).limits == Limits(1, 2, 3)
