"""Identifies callers by their tokens, and checks that the token permits the request.

Tokens read from the database are cached for `STALE_SECONDS`. So a revocation through this process holds at once, and
through another process within that time. While the database cannot be reached, cached tokens stay valid for
`GRACE_SECONDS`; other tokens are refused with 503.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from control_plane.accounts.errors import NotAllowed
from control_plane.accounts.identity import Identity
from control_plane.accounts.store import AccountStore, Holder
from control_plane.accounts.tokens import Scope, digest_of, now_ms
from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

STALE_SECONDS = 2.0
GRACE_SECONDS = 120.0
_MAX_CACHED = 10_000


@dataclass
class _Known:
    """A token's holder, and when the database was read."""

    holder: Holder | None
    read_at: float


class Authenticator:
    """Checks tokens against the database, with a short cache; one per process."""

    def __init__(self, store: AccountStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._reads: dict[bytes | str | None, asyncio.Task[Any]] = {}
        """Reads under way: by token digest, by account; None for whether any account exists."""
        self._epoch = 0
        self._is_open_known: tuple[bool, float] | None = None
        self.used_ms: dict[str, int] = {}
        """When each token was last used. `Accounts` saves and empties this regularly."""

    async def is_open(self) -> bool:
        """Return whether no account exists: then requests need no token. Accounts are never deleted."""
        known = self._is_open_known
        if known is not None and (not known[0] or self._clock() - known[1] < STALE_SECONDS):
            return known[0]
        try:
            return await self._once(None, self._read_is_open)
        except Unavailable:
            if known is None or self._clock() - known[1] > GRACE_SECONDS:
                raise
            return known[0]

    def has_accounts(self) -> bool:
        """Return whether accounts exist as far as the last request has shown; reads no database."""
        return self._is_open_known is None or not self._is_open_known[0]

    async def identify(self, secret: str, scope: Scope | None, account: str | None) -> Identity:
        """Return the identity of a token. `account` is the account that the request names, if any.

        Raise Unauthenticated for an invalid token, NotAllowed for a request that it does not permit, or Unavailable.
        """
        digest = digest_of(secret)
        holder = await self._holder(digest) if digest is not None else None
        if holder is None:
            raise Unauthenticated("the API token is not known; send a valid one as Authorization: Bearer tdm_...")
        token, now = holder.token, now_ms()
        if (state := token.state(now)) != "active":
            raise Unauthenticated(f"the API token {token.id} is {state}; send another one")
        self.used_ms[token.id] = now
        self._check(holder, scope, account)
        limits = holder.account.limits
        if account is None or account == holder.account.id:
            return Identity(holder.account.id, token, limits)
        other = await self._once(account, lambda: self._store.get(account))
        if other.disabled_ms is not None and scope == "inference":
            raise NotAllowed(f"account {account} is disabled; enable it first")
        return Identity(account, token, other.limits)

    def forget(self) -> None:
        """Drop the cache after a change, so that the database is read again."""
        self._epoch += 1
        self._known.clear()
        self._reads.clear()  # requests that waited keep the old read; later requests start a new one
        self._is_open_known = None

    @staticmethod
    def _check(holder: Holder, scope: Scope | None, account: str | None) -> None:
        token = holder.token
        if holder.account.disabled_ms is not None:
            raise NotAllowed(f"account {holder.account.id} is disabled; ask the operator")
        if scope is not None and not token.may(scope):
            has = ", ".join(sorted(token.scopes))
            raise NotAllowed(f"token {token.id} has the scopes {has}, this needs the scope {scope}; use another token")
        if account is not None and account != holder.account.id and not token.may("admin"):
            raise NotAllowed(f"the API token belongs to account {holder.account.id}, not {account}; correct the URL")

    async def _holder(self, digest: bytes) -> Holder | None:
        known = self._known.get(digest)
        if known is None or self._clock() - known.read_at >= STALE_SECONDS:
            known = await self._refresh(digest, known)
        return known.holder

    async def _refresh(self, digest: bytes, before: _Known | None) -> _Known:
        try:
            return await self._once(digest, lambda: self._read_holder(digest))
        except Unavailable:
            if before is None or self._clock() - before.read_at > GRACE_SECONDS:
                raise
            return before

    async def _once(self, key: bytes | str | None, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Read the database, once for all requests that need the same at the same time."""
        task: asyncio.Task[T] | None = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(read())
            task.add_done_callback(lambda done: self._read_ended(key, done))
        return await asyncio.shield(task)

    def _read_ended(self, key: bytes | str | None, task: asyncio.Task[Any]) -> None:
        if self._reads.get(key) is task:
            del self._reads[key]
        if not task.cancelled() and isinstance(error := task.exception(), Unavailable):
            log.warning("accounts_unreadable", error=str(error))

    async def _read_is_open(self) -> bool:
        epoch, started = self._epoch, self._clock()
        is_open = not await self._store.exists_any()
        if epoch == self._epoch:
            self._is_open_known = is_open, started
        return is_open

    async def _read_holder(self, digest: bytes) -> _Known:
        epoch, started = self._epoch, self._clock()
        known = _Known(await self._store.find(digest), started)
        if epoch == self._epoch:  # else the read may be older than the change
            self._known[digest] = known
            self._known.move_to_end(digest)
            while len(self._known) > _MAX_CACHED:
                self._known.popitem(last=False)
        return known
