"""Who is calling, and may they do this?

What the database says of a token is believed for `STALE_SECONDS`. A revocation through this process holds at once,
through another one within that time. While the database cannot be reached, what it said last is believed for
`GRACE_SECONDS` longer; whom it has not told of meanwhile is refused with 503.
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
_MAX_REMEMBERED = 10_000


@dataclass
class _Known:
    """What the database said, and when."""

    holder: Holder | None
    read_at: float


class Authenticator:
    """Knows tokens for a short while; one per process."""

    def __init__(self, store: AccountStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._asking: dict[bytes | str | None, asyncio.Task[Any]] = {}
        """By digest, by account; None: whether there is any."""
        self._epoch = 0
        self._is_open_known: tuple[bool, float] | None = None
        self.used_ms: dict[str, int] = {}
        """When each token was used since this was last emptied; kept in the database once a while."""

    async def is_open(self) -> bool:
        """Whether no account has been made: then no token is asked for. Accounts are never deleted."""
        known = self._is_open_known
        if known is not None and (not known[0] or self._clock() - known[1] < STALE_SECONDS):
            return known[0]
        try:
            return await self._once(None, self._ask_is_open)
        except Unavailable:
            if known is None or self._clock() - known[1] > GRACE_SECONDS:
                raise
            return known[0]

    async def identify(self, secret: str, scope: Scope | None, account: str | None) -> Identity:
        """Return whom a token speaks for; `account` is the one that the request names, if it does.

        Raises Unauthenticated for no good token, NotAllowed for one that is not good for this, Unavailable.
        """
        digest = digest_of(secret)
        holder = await self._holder(digest) if digest is not None else None
        if holder is None:
            raise Unauthenticated("the API token is not known here; send a valid one as Authorization: Bearer tdm_...")
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
        """Something was changed here: ask the database again."""
        self._epoch += 1
        self._known.clear()
        self._asking.clear()  # those who asked before the change get what was so then, those who come now do not
        self._is_open_known = None

    @staticmethod
    def _check(holder: Holder, scope: Scope | None, account: str | None) -> None:
        token = holder.token
        if holder.account.disabled_ms is not None:
            raise NotAllowed(f"account {holder.account.id} is disabled; ask who runs this")
        if scope is not None and not token.may(scope):
            has = ", ".join(sorted(token.scopes))
            raise NotAllowed(f"the API token {token.id} may {has}, this needs the scope {scope}; use another token")
        if account is not None and account != holder.account.id and not token.may("admin"):
            raise NotAllowed(f"the API token is of account {holder.account.id}, not {account}; correct the URL")

    async def _holder(self, digest: bytes) -> Holder | None:
        known = self._known.get(digest)
        if known is None or self._clock() - known.read_at >= STALE_SECONDS:
            known = await self._read(digest, known)
        return known.holder

    async def _read(self, digest: bytes, before: _Known | None) -> _Known:
        try:
            return await self._once(digest, lambda: self._ask(digest))
        except Unavailable:
            if before is None or self._clock() - before.read_at > GRACE_SECONDS:
                raise
            return before

    async def _once(self, what: bytes | str | None, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Ask the database, once for all who want to know the same at the same time."""
        task: asyncio.Task[T] | None = self._asking.get(what)
        if task is None:
            task = self._asking[what] = asyncio.create_task(ask())
            task.add_done_callback(lambda done: self._asked(what, done))
        return await asyncio.shield(task)

    def _asked(self, what: bytes | str | None, task: asyncio.Task[Any]) -> None:
        if self._asking.get(what) is task:
            del self._asking[what]
        if not task.cancelled() and isinstance(error := task.exception(), Unavailable):
            log.warning("accounts_unreadable", error=str(error))

    async def _ask_is_open(self) -> bool:
        epoch, asked_at = self._epoch, self._clock()
        is_open = not await self._store.exists_any()
        if epoch == self._epoch:
            self._is_open_known = is_open, asked_at
        return is_open

    async def _ask(self, digest: bytes) -> _Known:
        epoch, asked_at = self._epoch, self._clock()
        known = _Known(await self._store.find(digest), asked_at)
        if epoch == self._epoch:  # else it may be from before the change
            self._known[digest] = known
            self._known.move_to_end(digest)
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return known
