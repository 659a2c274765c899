"""Writes one ledger row per request: opened at admission, closed once.

One task writes all changes since its last transaction together. A row is written before the request's first token
leaves. A close that cannot be written is retried until it can. A killed gateway leaves rows open; another gateway, or
its own next start, closes these as aborted (control_plane.accounts.incarnations).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.generation import PhaseWork, Usage
from control_plane.storage.database import Database
from control_plane.storage.tables import ledger
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

Status = Literal["finished", "failed", "cancelled", "aborted"]
"""finished: complete. failed: it broke. cancelled: the client left. aborted: we stopped it, as a gateway that ends."""
GATEWAY_LOST = "GatewayLost"
"""The error of rows whose gateway was lost. If that gateway is alive after all, its own close replaces this."""
REFUSED = "RefusedFigures"
"""The error of rows whose values the database refused, because of a bug. The log has the values."""

_DAY_MS = 86_400_000
_MAX_TOGETHER = 512
_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Opening:
    request_id: str
    account: str
    token_id: str | None
    model: str
    num_choices: int
    num_asked_tokens: int


@dataclass(frozen=True)
class Closing:
    request_id: str
    status: Status
    usage: Usage
    finish_reasons: str = ""
    error: str = ""

    def values(self, closed_ms: int) -> dict[str, Any]:
        usage = self.usage
        return {
            "status": self.status,
            "closed_ms": closed_ms,
            "finish_reasons": self.finish_reasons,
            "error": self.error,
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_computed_tokens": usage.num_computed_tokens,
            "num_cached_tokens": usage.num_cached_tokens,
            "num_pool_tokens": usage.num_pool_tokens,
            "num_completion_tokens": usage.num_completion_tokens,
            "microneurons": usage.microneurons or 0,
            "num_seams": usage.num_seams,
            **vars(usage.work),
        }


NOTHING_USED = Usage(0, 0, 0, 0, PhaseWork(), 0)
_PendingOpening = tuple[dict[str, Any], asyncio.Future[None]]
"""An opening's row, and the future that is done when the row is written."""


class Ledger:
    """Writes the rows of one gateway, on one event loop."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self._openings: list[_PendingOpening] = []
        self._closings: list[dict[str, Any]] = []
        self._writer: asyncio.Task[None] | None = None
        self._is_failing = False

    @property
    def is_failing(self) -> bool:
        """Whether the last rows could not be written: the next ones may not be, either."""
        return self._is_failing

    def check(self) -> None:
        """Raise Unavailable if the database failed a moment ago: such a request could not be written."""
        self._database.check()

    def open(self, opening: Opening) -> asyncio.Future[None]:
        """Open a row. The future is done when the row is written, or raises Unavailable."""
        now_ms = self._database.now_ms()
        row = {
            **vars(opening),
            "gateway": self._gateway,
            "day": now_ms // _DAY_MS,
            "opened_ms": now_ms,
            "status": "open",
        }
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._openings.append((row, written))
        self._write_soon()
        return written

    def close(self, closing: Closing) -> None:
        """Close a row that was opened here. Call this once per row."""
        self._closings.append(_row(closing, self._database.now_ms()))
        self._write_soon()

    async def drain(self) -> None:
        """Wait until everything is written."""
        while self._writer is not None:
            await asyncio.shield(self._writer)

    def _write_soon(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._openings or self._closings:
                openings, closings = self._next()
                error = await self._write_or_split(openings, closings)
                if error is not None:
                    log.warning("ledger_delayed", num_closings=len(closings), error=error.message)
                    self._closings[:0] = closings
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._writer = None

    def _next(self) -> tuple[list[_PendingOpening], list[dict[str, Any]]]:
        """Take the next changes to write. A close waits for its opening, whose row it needs."""
        openings, self._openings = self._openings[:_MAX_TOGETHER], self._openings[_MAX_TOGETHER:]
        waiting = {row["request_id"] for row, _ in self._openings}
        ready = [closing for closing in self._closings if closing["row_id"] not in waiting]
        early = [closing for closing in self._closings if closing["row_id"] in waiting]
        self._closings = ready[_MAX_TOGETHER:] + early
        return openings, ready[:_MAX_TOGETHER]

    async def _write_or_split(
        self, openings: Sequence[_PendingOpening], closings: Sequence[dict[str, Any]]
    ) -> TandemError | None:
        """Write rows together and resolve the openings' futures. Return the error if writing is not possible now.

        If the database refuses a row, rows are written one by one, so that the others are written.
        """
        error: TandemError | None
        try:
            await self._database.with_retry(lambda: self._write([row for row, _ in openings], closings))
            error = None
        except (IntegrityError, InvalidRequest) as refusal:
            if len(openings) + len(closings) > 1:
                return await self._write_singly(openings, closings)
            self._refused(openings, closings, refusal)
            return None
        except TandemError as failure:
            error = failure
        except Exception as unexpected:
            log.exception("ledger_failed")
            error = InternalError(f"the ledger could not be written: {message_of(unexpected)}")
        self._is_failing = error is not None
        for _, written in openings:
            _resolve(written, error)
        return error

    async def _write_singly(
        self, openings: Sequence[_PendingOpening], closings: Sequence[dict[str, Any]]
    ) -> TandemError | None:
        error = None
        for opening in openings:
            error = await self._write_or_split([opening], []) or error
        for closing in closings:
            if error is None:  # else all are retried
                error = await self._write_or_split([], [closing])
        return error

    def _refused(
        self,
        openings: Sequence[_PendingOpening],
        closings: Sequence[dict[str, Any]],
        refusal: IntegrityError | InvalidRequest,
    ) -> None:
        """Report a row that the database refuses, and close its request as failed."""
        error: TandemError = InternalError("the ledger refused the request's row")
        if isinstance(refusal, InvalidRequest):
            error = refusal
        log.error(
            "ledger_row_refused",
            rows=[*(row for row, _ in openings), *closings],
            error=type(getattr(refusal, "orig", None) or refusal).__name__,
        )
        for _, written in openings:
            _resolve(written, error)
        for closing in closings:
            if closing["error"] != REFUSED:
                empty = Closing(closing["row_id"], "failed", NOTHING_USED, error=REFUSED)
                self._closings.append(_row(empty, self._database.now_ms()))

    async def _write(self, openings: Sequence[dict[str, Any]], closings: Sequence[dict[str, Any]]) -> None:
        insert = self._database.insert(ledger).on_conflict_do_nothing()

        def write(connection: sa.Connection) -> None:
            if openings:
                connection.execute(insert, openings)
            if closings:
                connection.execute(_CLOSE, closings)

        await self._database.run(write)


_is_open = ledger.c.closed_ms.is_(None) | (ledger.c.error == GATEWAY_LOST)
_CLOSE = (
    sa.update(ledger)
    .where((ledger.c.request_id == sa.bindparam("row_id")) & _is_open)
    .values({name: sa.bindparam(name) for name in Closing("", "finished", NOTHING_USED).values(0)})
)


def _row(closing: Closing, closed_ms: int) -> dict[str, Any]:
    return {"row_id": closing.request_id, **closing.values(closed_ms)}


def _resolve(written: asyncio.Future[None], error: TandemError | None) -> None:
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(type(error)(error.message, retry_after_seconds=error.retry_after_seconds))
        written.exception()  # marks it as retrieved: the waiting request may be gone
