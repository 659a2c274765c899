"""Enforces limits exactly, across several gateways that share a database.

Each account has one row: its window and the revision of the last write. A write names the revision that it is based on.
One statement writes if that revision is still the last, and otherwise returns the current row (compare-and-swap). So no
gateway holds a lock, and a gateway that dies has changed nothing. Requests that arrive at a gateway during a statement
are decided together by the next statement.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from control_plane.accounts.errors import LimitReached
from control_plane.accounts.limits import Limits, RateLimitStatus, Refusal, Window
from control_plane.storage.database import Database
from control_plane.storage.tables import windows
from tandem_runtime.errors import InternalError, TandemError, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_MAX_TOGETHER = 256
_MAX_WAITING = 4096
_MAX_WRITE_SECONDS = 5.0
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Admission:
    """An admitted request, and what to settle when it ends."""

    account: str
    tick: int
    num_tokens: int
    """The estimate that was counted."""
    is_counted: bool
    """Whether there is anything to settle at the end."""
    is_running: bool
    """Whether it counts as a concurrent request."""
    requests: RateLimitStatus | None
    tokens: RateLimitStatus | None


@dataclass
class _Change:
    """A change of a window. `answer` gets the result after the write."""

    apply: Callable[[Window], tuple[Window, Any]]
    answer: asyncio.Future[Any] | None = None
    """None if no caller waits: then the change is retried until it succeeds."""


class Limiter:
    """Admits requests of accounts with limits; one per gateway, on one event loop."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self._account_limiters: dict[str, AccountLimiter] = {}

    async def admit(self, account: str, limits: Limits, num_tokens: int) -> Admission:
        """Count a request with an estimate of its tokens. Raise LimitReached or Unavailable."""
        account_limiter = self._limiter_of(account)
        account_limiter.check_blocked(limits)

        def apply(window: Window) -> tuple[Window, tuple[Window, Refusal | None]]:
            after = window.admit(limits, num_tokens, self._gateway, self._database.now())
            return after[0], after

        answer = account_limiter.change(apply)
        try:
            window, refusal = await asyncio.shield(answer)
        except asyncio.CancelledError:  # the caller left, but the write may still count it
            answer.add_done_callback(lambda done: self._undo(account, limits, num_tokens, done))
            raise
        if refusal is not None:
            raise account_limiter.refused(limits, refusal, _statuses(window, limits, self._database.now()))
        return self._admission(account, limits, num_tokens, window)

    def settle(self, admission: Admission, num_tokens: int) -> None:
        """Replace the estimate by the tokens used. Call this once, when the request has ended."""
        if not admission.is_counted:
            return

        def apply(window: Window) -> tuple[Window, None]:
            extra = num_tokens - admission.num_tokens
            now, is_running = self._database.now(), admission.is_running
            return window.settle(admission.tick, extra, self._gateway, was_running=is_running, now=now), None

        self._limiter_of(admission.account).change_later(apply)

    async def forget(self, is_alive: Callable[[str], bool]) -> None:
        """Remove running requests of lost gateways from every account's window."""
        some_run = windows.c.state.not_like('%"running":{}%')
        async with self._database.each() as connection:
            rows = (await connection.execute(sa.select(windows.c.account, windows.c.state).where(some_run))).all()
        for account, state in rows:
            for gateway in Window.decode(state).running:
                if gateway != self._gateway and not is_alive(gateway):
                    await self._limiter_of(account).change(_without(gateway))

    async def drain(self) -> None:
        """Wait until all settlements are written."""
        await asyncio.gather(*(each.idle() for each in list(self._account_limiters.values())))

    def _admission(self, account: str, limits: Limits, num_tokens: int, window: Window) -> Admission:
        is_running = limits.max_concurrent_requests is not None
        is_counted = is_running or limits.max_tokens_per_minute is not None
        statuses = _statuses(window, limits, self._database.now())
        return Admission(account, window.used[-1][0], num_tokens, is_counted, is_running, *statuses)

    def _undo(
        self, account: str, limits: Limits, num_tokens: int, done: asyncio.Future[tuple[Window, Refusal | None]]
    ) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        window, refusal = done.result()
        if refusal is None:
            self.settle(self._admission(account, limits, num_tokens, window), 0)

    def _limiter_of(self, account: str) -> AccountLimiter:
        if account not in self._account_limiters:
            self._account_limiters[account] = AccountLimiter(self._database, account, self._gateway)
        return self._account_limiters[account]


class AccountLimiter:
    """Reads and writes one account's window for this gateway.

    Each write sets the number of this gateway's running requests itself: if the answer to an earlier write was lost,
    the window may count a request that this gateway refused.
    """

    def __init__(self, database: Database, account: str, gateway: str) -> None:
        self._database = database
        self._account = account
        self._gateway = gateway
        self._num_running = 0
        self._is_uncertain = False
        """Whether the answer to the last write was lost."""
        self._known: tuple[str, Window] | None = None
        self._waiting: list[_Change] = []
        self._writer: asyncio.Task[None] | None = None
        self._blocked: tuple[Limits, float, LimitReached] | None = None

    def change(self, apply: Callable[[Window], tuple[Window, Any]]) -> asyncio.Future[Any]:
        """Change the window. The future gets the second result of `apply` after the write. Raise Unavailable."""
        if len(self._waiting) >= _MAX_WAITING:
            raise Unavailable(
                f"too many requests of account {self._account} wait for its limits; try again",
                retry_after_seconds=1.0,
            )
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._enqueue(_Change(apply, answer))
        return answer

    def change_later(self, apply: Callable[[Window], tuple[Window, Any]]) -> None:
        self._enqueue(_Change(apply))

    async def idle(self) -> None:
        if self._writer is not None:
            await asyncio.shield(self._writer)

    def check_blocked(self, limits: Limits) -> None:
        """Raise the last refusal again while time alone can end it, without a database read."""
        if self._blocked is None:
            return
        known_limits, until, error = self._blocked
        seconds = until - time.monotonic()
        if known_limits == limits and seconds > 0:
            raise _again(error, seconds)
        self._blocked = None

    def refused(self, limits: Limits, refusal: Refusal, statuses: RateLimitStatuses) -> LimitReached:
        seconds = refusal.retry_after_seconds
        error = LimitReached(_SENTENCES[refusal.what].format(account=self._account, limit=refusal.limit))
        error.statuses = statuses
        if refusal.what == "requests":  # only time frees these
            self._blocked = limits, time.monotonic() + seconds, error
        return _again(error, seconds)

    def _enqueue(self, change: _Change) -> None:
        self._waiting.append(change)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MAX_TOGETHER], self._waiting[_MAX_TOGETHER:]
                try:
                    results = await self._database.with_retry(partial(self._write, batch))
                except TandemError as error:
                    await self._failed(batch, error)
                except Exception as unexpected:
                    log.exception("limits_failed", account=self._account)
                    await self._failed(batch, InternalError(f"the limits could not be read: {message_of(unexpected)}"))
                else:
                    for change, result in zip(batch, results, strict=True):
                        if change.answer is not None and not change.answer.done():
                            change.answer.set_result(result)
        finally:
            self._writer = None

    async def _failed(self, batch: list[_Change], error: TandemError) -> None:
        """Fail the changes that callers wait for, and retry the others."""
        self._known = None
        for change in batch:
            if change.answer is not None and not change.answer.done():
                change.answer.set_exception(type(error)(error.message, retry_after_seconds=error.retry_after_seconds))
                change.answer.exception()  # marks it as retrieved: the waiting request may be gone
        lasting = [change for change in batch if change.answer is None]
        if self._is_uncertain and not lasting:
            lasting = [_Change(lambda window: (window, None))]
        if lasting:
            log.warning("settlement_delayed", account=self._account, num=len(lasting), error=error.message)
            self._waiting[:0] = lasting
            await asyncio.sleep(_RETRY_SECONDS)

    async def _write(self, batch: list[_Change]) -> list[Any]:
        """Write all changes of a batch in one statement. Retry if another gateway was faster."""
        deadline = time.monotonic() + _MAX_WRITE_SECONDS
        while time.monotonic() < deadline:
            revision, window = self._known or await self._read()
            results, after = [], window.with_running(self._gateway, self._num_running)
            for change in batch:
                after, result = change.apply(after)
                results.append(result)
            # If nothing changes, it is enough that the window is still the one that was read.
            mine = revision if after == window else uuid.uuid4().hex
            self._known = await self._read() if mine == revision else await self._swap(revision, mine, after)
            self._is_uncertain = False
            if self._known[0] == mine:
                self._num_running = after.running.get(self._gateway, 0)
                return results
        raise Unavailable(
            f"the limits of account {self._account} could not be read within {_MAX_WRITE_SECONDS:g} s; try again",
            retry_after_seconds=1.0,
        )

    async def _read(self) -> tuple[str, Window]:
        """Return the account's revision and window. Create the row if it does not exist."""
        first = {"account": self._account, "revision": "", "state": Window().encode()}
        insert = self._database.insert(windows).on_conflict_do_nothing()

        def read(connection: sa.Connection) -> Any:
            row = connection.execute(_READ, {"whose": self._account}).first()
            if row is None:
                connection.execute(insert, first)
                row = connection.execute(_READ, {"whose": self._account}).one()
            return row

        row = await self._database.run(read, single=True)
        return row.revision, Window.decode(row.state)

    async def _swap(self, before: str, mine: str, window: Window) -> tuple[str, Window]:
        """Write a window if `before` is still the last revision. Return the row that the database then has."""
        values = {"whose": self._account, "before": before, "mine": mine, "after": window.encode()}
        self._is_uncertain = True
        row = await self._database.run(lambda connection: connection.execute(_SWAP, values).first(), single=True)
        return (row.revision, Window.decode(row.state)) if row else await self._read()


_whose = windows.c.account == sa.bindparam("whose", type_=sa.String)
_is_last = windows.c.revision == sa.bindparam("before", type_=sa.String)
_READ = sa.select(windows.c.revision, windows.c.state).where(_whose)
_SWAP = (
    sa.update(windows)
    .where(_whose)
    .values(
        state=sa.case((_is_last, sa.bindparam("after", type_=sa.String)), else_=windows.c.state),
        revision=sa.case((_is_last, sa.bindparam("mine", type_=sa.String)), else_=windows.c.revision),
    )
    .returning(windows.c.revision, windows.c.state)
)

RateLimitStatuses = tuple[RateLimitStatus | None, RateLimitStatus | None]

_SENTENCES = {
    "requests": "account {account} has used its {limit:,} requests a minute; try again later, or have the limit raised",
    "tokens": "account {account} would use more than its {limit:,} tokens a minute; try again later, ask for fewer, or "
    "have the limit raised",
    "concurrency": "account {account} has {limit:,} requests running, which is its limit; try again when one has ended",
}


def _without(gateway: str) -> Callable[[Window], tuple[Window, None]]:
    return lambda window: (window.with_running(gateway, 0), None)


def _statuses(window: Window, limits: Limits, now: float) -> RateLimitStatuses:
    return window.requests(limits, now), window.tokens(limits, now)


def _again(error: LimitReached, seconds: float) -> LimitReached:
    copy = LimitReached(error.message, retry_after_seconds=seconds)
    copy.statuses = error.statuses
    return copy
