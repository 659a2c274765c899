"""Valid tokens are accepted; changes hold at once in this process and within seconds in others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from control_plane.accounts import authenticator as authenticator_module
from control_plane.accounts.authenticator import GRACE_SECONDS, STALE_SECONDS, Authenticator
from control_plane.accounts.errors import NoSuchThing, NotAllowed
from control_plane.accounts.limits import Limits
from control_plane.accounts.service import Accounts
from control_plane.accounts.store import Account, AccountStore, Holder
from control_plane.accounts.tokens import new_secret, now_ms
from tandem_runtime.errors import Unauthenticated, Unavailable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedStore(AccountStore):
    """Counts reads of the database, and can be cut off from it."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__(accounts.database)
        self.num_reads = 0
        self.is_down = False

    async def get(self, account_id: str) -> Account:
        self.num_reads += 1
        return await super().get(account_id)

    async def find(self, digest: bytes) -> Holder | None:
        self.num_reads += 1
        if self.is_down:
            raise Unavailable("the database is away")
        return await super().find(digest)

    async def exists_any(self) -> bool:
        self.num_reads += 1
        if self.is_down:
            raise Unavailable("the database is away")
        return await super().exists_any()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(accounts: Accounts) -> WatchedStore:
    return WatchedStore(accounts)


@pytest.fixture
def authenticator(store: WatchedStore, clock: Clock) -> Authenticator:
    return Authenticator(store, clock)


async def test_it_is_open_until_the_first_account_and_closed_for_good_then(
    authenticator: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    assert await authenticator.is_open() and not authenticator.has_accounts()
    await store.create("me")
    clock.now += STALE_SECONDS
    assert not await authenticator.is_open() and authenticator.has_accounts()
    num_reads = store.num_reads
    clock.now += 1e6
    assert not await authenticator.is_open() and store.num_reads == num_reads


async def test_a_token_enters_its_own_account_with_its_scopes(
    authenticator: Authenticator, store: WatchedStore
) -> None:
    for name in ("me", "you"):
        await store.create(name, Limits(max_concurrent_requests=len(name)))
    token, secret = await store.create_token("me", "laptop", ["inference"])
    for account in ("me", None):
        identity = await authenticator.identify(secret, "inference", account)
        assert (identity.account, identity.token, identity.limits) == ("me", token, Limits(None, None, 2))
    with pytest.raises(NotAllowed, match="to account me, not you"):
        await authenticator.identify(secret, "inference", "you")
    with pytest.raises(NotAllowed, match="needs the scope usage"):
        await authenticator.identify(secret, "usage", "me")
    with pytest.raises(Unauthenticated, match="not known"):
        await authenticator.identify(new_secret(), "inference", None)


async def test_an_admin_acts_for_any_account_that_there_is(authenticator: Authenticator, store: WatchedStore) -> None:
    for name in ("root", "you"):
        await store.create(name, Limits(max_concurrent_requests=len(name)))
    _, secret = await store.create_token("root", "first", ["admin"])
    identity = await authenticator.identify(secret, "inference", "you")
    assert (identity.account, identity.limits.max_concurrent_requests) == ("you", 3)
    with pytest.raises(NoSuchThing, match="no account nobody"):
        await authenticator.identify(secret, "inference", "nobody")
    await store.change("you", disabled=True)
    with pytest.raises(NotAllowed, match="you is disabled"):
        await authenticator.identify(secret, "inference", "you")
    assert (await authenticator.identify(secret, "admin", "you")).account == "you"


async def test_expired_tokens_and_disabled_accounts_are_refused(
    authenticator: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create("me")
    token, secret = await store.create_token("me", "laptop", ["inference"], now_ms() + 60_000)
    await authenticator.identify(secret, "inference", None)
    monkeypatch.setattr(authenticator_module, "now_ms", lambda: token.expires_ms)
    with pytest.raises(Unauthenticated, match="is expired"):
        await authenticator.identify(secret, "inference", None)
    monkeypatch.undo()
    _, other = await store.create_token("me", "laptop", ["inference"])
    await store.change("me", disabled=True)
    with pytest.raises(NotAllowed, match="me is disabled"):
        await authenticator.identify(other, "inference", None)


async def test_a_revocation_here_holds_at_once_and_elsewhere_within_seconds(
    authenticator: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    elsewhere = Authenticator(store, clock)
    await store.create("me")
    token, secret = await store.create_token("me", "laptop", ["inference"])
    for each in (authenticator, elsewhere):
        await each.identify(secret, "inference", None)
    await store.revoke("me", token.id)
    authenticator.forget()
    with pytest.raises(Unauthenticated, match="is revoked"):
        await authenticator.identify(secret, "inference", None)
    await elsewhere.identify(secret, "inference", None)  # it does not know yet
    clock.now += STALE_SECONDS
    with pytest.raises(Unauthenticated, match="is revoked"):
        await elsewhere.identify(secret, "inference", None)


async def test_the_database_is_asked_once_for_many_and_not_for_what_cannot_be_a_token(
    authenticator: Authenticator, store: WatchedStore
) -> None:
    await store.create("me")
    _, secret = await store.create_token("me", "laptop", ["inference"])
    store.num_reads = 0
    await asyncio.gather(*(authenticator.identify(secret, "inference", None) for _ in range(50)))
    await authenticator.identify(secret, "inference", None)
    for _ in range(5):
        with pytest.raises(Unauthenticated):
            await authenticator.identify("tdm_no-token", "inference", None)
    assert store.num_reads == 1


async def test_those_who_come_at_one_moment_ask_the_database_once(
    authenticator: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    assert all(await asyncio.gather(*(authenticator.is_open() for _ in range(50)))) and store.num_reads == 1
    clock.now += STALE_SECONDS
    assert all(await asyncio.gather(*(authenticator.is_open() for _ in range(50)))) and store.num_reads == 2
    for name in ("root", "you"):
        await store.create(name)
    _, secret = await store.create_token("root", "first", ["admin"])
    store.num_reads = 0
    await asyncio.gather(*(authenticator.identify(secret, "inference", "you") for _ in range(50)))
    assert store.num_reads == 2  # the token, and the account that it acts for


async def test_that_there_was_no_account_is_not_remembered_from_before_the_first(
    authenticator: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_read, may_answer = asyncio.Event(), asyncio.Event()
    exists_any = store.exists_any

    async def slow() -> bool:
        found = await exists_any()
        has_read.set()
        await may_answer.wait()
        return found

    monkeypatch.setattr(store, "exists_any", slow)
    early = asyncio.create_task(authenticator.is_open())
    await has_read.wait()
    await store.create("me")
    authenticator.forget()
    may_answer.set()
    assert await early and not await authenticator.is_open()


async def test_a_read_that_began_before_a_change_is_not_believed_after_it(
    authenticator: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create("me")
    token, secret = await store.create_token("me", "laptop", ["inference"])
    has_read, may_answer = asyncio.Event(), asyncio.Event()
    find = store.find

    async def slow(digest: bytes) -> Holder | None:
        found = await find(digest)
        has_read.set()
        await may_answer.wait()
        return found

    monkeypatch.setattr(store, "find", slow)
    early = asyncio.create_task(authenticator.identify(secret, "inference", None))
    await has_read.wait()
    await store.revoke("me", token.id)
    authenticator.forget()
    may_answer.set()
    assert (await early).account == "me"  # it came before the revocation
    with pytest.raises(Unauthenticated, match="is revoked"):
        await authenticator.identify(secret, "inference", None)


async def test_without_the_database_those_who_are_known_go_on_for_a_bounded_time(
    authenticator: Authenticator, store: WatchedStore, clock: Clock
) -> None:
    await store.create("me")
    _, secret = await store.create_token("me", "laptop", ["inference"])
    assert not await authenticator.is_open()
    await authenticator.identify(secret, "inference", None)
    store.is_down = True
    clock.now += GRACE_SECONDS
    assert not await authenticator.is_open()
    assert (await authenticator.identify(secret, "inference", None)).account == "me"
    with pytest.raises(Unavailable, match="database"):
        await authenticator.identify(new_secret(), "inference", None)
    clock.now += 1
    with pytest.raises(Unavailable, match="database"):
        await authenticator.identify(secret, "inference", None)


async def test_uses_are_noted_now_and_then(open_accounts: Callable[[], Accounts]) -> None:
    accounts = open_accounts()
    await accounts.open()
    await accounts.store.create("me")
    token, secret = await accounts.store.create_token("me", "laptop", ["inference"])
    await accounts.authenticator.identify(secret, "inference", None)
    assert (await accounts.store.token("me", token.id)).used_ms is None
    await accounts._save_uses()
    used_ms = (await accounts.store.token("me", token.id)).used_ms
    assert used_ms is not None and used_ms % 60_000 == 0
