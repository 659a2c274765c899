"""How does each request get its row: opened when it is admitted, closed once?

One task writes what has come together since its last transaction. A row is there before the first token leaves; a
closing that cannot be written is tried again until it can. A gateway that is killed leaves rows open, which another
one, or its next life, closes as aborted (control_plane.accounts.incarnations).
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

log = get_logger(__name__)

Status = Literal["finished", "failed", "cancelled"]
GATEWAY_LOST = "GatewayLost"
"""The error of rows whose gateway was not heard of any more; if it lives after all, its own word holds."""
REFUSED = "RefusedFigures"
"""The error of rows whose figures the database refused, because of a mistake of ours; the log has them."""

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
            **vars(usage.work),
        }


NOTHING_USED = Usage(0, 0, 0, 0, PhaseWork(), 0)
_Waiting = tuple[dict[str, Any], asyncio.Future[None]]
"""An opening's row, and who is told when it is there."""


class Ledger:
    """Writes the rows of one gateway; on one event loop."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self._openings: list[_Waiting] = []
        self._closings: list[dict[str, Any]] = []
        self._writer: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise Unavailable if nothing could be opened a moment ago, so that nobody begins what cannot be written."""
        self._database.check()

    def open(self, opening: Opening) -> asyncio.Future[None]:
        """Open a row; the future tells when it is there, or raises Unavailable."""
        now_ms = self._database.now_ms()
        row = {
            **vars(opening),
            "gateway": self._gateway,
            "day": now_ms // _DAY_MS,
            "opened_ms": now_ms,
            "status": "open",
        }
        is_there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._openings.append((row, is_there))
        self._write_soon()
        return is_there

    def close(self, closing: Closing) -> None:
        """Close a row that was opened here; to be called once."""
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

    def _next(self) -> tuple[list[_Waiting], list[dict[str, Any]]]:
        """Take what is written next: no closing before its opening, whose row it would not find."""
        openings, self._openings = self._openings[:_MAX_TOGETHER], self._openings[_MAX_TOGETHER:]
        waiting = {row["request_id"] for row, _ in self._openings}
        ready = [closing for closing in self._closings if closing["row_id"] not in waiting]
        early = [closing for closing in self._closings if closing["row_id"] in waiting]
        self._closings = ready[_MAX_TOGETHER:] + early
        return openings, ready[:_MAX_TOGETHER]

    async def _write_or_split(
        self, openings: Sequence[_Waiting], closings: Sequence[dict[str, Any]]
    ) -> TandemError | None:
        """Write rows together, and tell each opening what came of it; return why that is not possible now.

        One row that is nonsense does not take others along.
        """
        error: TandemError | None
        try:
            await self._database.again(lambda: self._write([row for row, _ in openings], closings))
            error = None
        except (IntegrityError, InvalidRequest) as refusal:
            if len(openings) + len(closings) > 1:
                return await self._write_singly(openings, closings)
            self._refused(openings, closings, refusal)
            return None
        except TandemError as failure:
            error = failure
        except Exception as bug:
            log.exception("ledger_failed")
            error = InternalError(f"the ledger could not be written: {bug!r}")
        for _, is_there in openings:
            _tell(is_there, error)
        return error

    async def _write_singly(
        self, openings: Sequence[_Waiting], closings: Sequence[dict[str, Any]]
    ) -> TandemError | None:
        error = None
        for opening in openings:
            error = await self._write_or_split([opening], []) or error
        for closing in closings:
            if error is None:  # else all of them are tried again
                error = await self._write_or_split([], [closing])
        return error

    def _refused(
        self,
        openings: Sequence[_Waiting],
        closings: Sequence[dict[str, Any]],
        refusal: IntegrityError | InvalidRequest,
    ) -> None:
        """Do what can be done about the one row that the database will not have."""
        told: TandemError = InternalError("the ledger refused the request's row")
        if isinstance(refusal, InvalidRequest):
            told = refusal
        log.error(
            "ledger_row_refused",
            rows=[*(row for row, _ in openings), *closings],
            error=str(getattr(refusal, "orig", refusal)),
        )
        for _, is_there in openings:
            _tell(is_there, told)
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


def _tell(is_there: asyncio.Future[None], error: TandemError | None) -> None:
    if is_there.done():
        return
    if error is None:
        is_there.set_result(None)
    else:
        is_there.set_exception(type(error)(error.message, retry_after_seconds=error.retry_after_seconds))
        is_there.exception()  # whoever waited may have left: nobody need read it
