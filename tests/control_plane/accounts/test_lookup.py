"""One read serves many calls, and no call gets a value from a read older than itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from control_plane.accounts.service import Accounts
from control_plane.accounts.store import Lookup
from control_plane.accounts.tokens import digest_of, new_secret
from tandem_runtime.errors import Unavailable


class Rows:
    """What a read finds: its own number, for all that begins with k. Waits for `may_answer`."""

    def __init__(self) -> None:
        self.reads: list[list[bytes]] = []
        self.was_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.fails = False

    async def read(self, digests: Sequence[bytes]) -> Mapping[bytes, int]:
        self.reads.append(list(digests))
        number = len(self.reads)
        self.was_asked.set()
        await self.may_answer.wait()
        if self.fails:
            raise Unavailable("the database is away")
        return {digest: number for digest in digests if digest.startswith(b"k")}


async def test_those_who_ask_during_a_read_share_the_next_one() -> None:
    rows = Rows()
    lookup: Lookup[int] = Lookup(rows.read)
    first = asyncio.create_task(lookup.find(b"k1"))
    await rows.was_asked.wait()
    later = [asyncio.create_task(lookup.find(digest)) for digest in (b"k1", b"k2", b"k2", b"x")]
    await asyncio.sleep(0)
    later[2].cancel()  # one that leaves takes nobody along
    rows.may_answer.set()
    assert await first == 1
    assert [await later[index] for index in (0, 1, 3)] == [2, 2, None]
    assert rows.reads == [[b"k1"], [b"k1", b"k2", b"x"]]


async def test_a_read_that_fails_fails_all_of_its_askers_and_no_later_one() -> None:
    rows = Rows()
    lookup: Lookup[int] = Lookup(rows.read)
    rows.fails = True
    rows.may_answer.set()
    results = await asyncio.gather(lookup.find(b"k1"), lookup.find(b"k2"), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, Unavailable]
    rows.fails = False
    assert await lookup.find(b"k1") == 2


async def test_many_users_at_one_moment_are_found_in_few_reads(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = accounts.store
    await store.create("me")
    made = [await store.create_token("me", f"laptop {index}", ["inference"]) for index in range(20)]
    num_reads, run = 0, accounts.database.run

    async def counted(*arguments: object, **options: object) -> object:
        nonlocal num_reads
        num_reads += 1
        return await run(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(accounts.database, "run", counted)
    secrets = [*(secret for _, secret in made), new_secret()]
    holders = await asyncio.gather(*(store.find(digest_of(secret) or b"") for secret in secrets))
    assert [holder.token if holder else None for holder in holders] == [*(token for token, _ in made), None]
    assert num_reads == 1


async def test_a_queue_for_connections_is_not_taken_for_a_database_that_is_away(accounts: Accounts) -> None:
    error = accounts.database.failed(PoolTimeoutError("QueuePool limit of size 8 overflow 0 reached"))
    assert isinstance(error, Unavailable) and "too many requests wait" in error.message
    accounts.database.check()  # others are not turned away
    assert not accounts.database.problem
