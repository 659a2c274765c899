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
from runtime.errors import InternalError, TandemError
from runtime.log import get_logger

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


class Ledger:
    """Writes the rows of one gateway; on one event loop."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self._openings: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self._closings: list[dict[str, Any]] = []
        self._writer: asyncio.Task[None] | None = None

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
                openings, self._openings = self._openings[:_MAX_TOGETHER], self._openings[_MAX_TOGETHER:]
                closings, self._closings = self._closings[:_MAX_TOGETHER], self._closings[_MAX_TOGETHER:]
                error = await self._write_or_split([row for row, _ in openings], closings)
                for _, is_there in openings:
                    _tell(is_there, error)
                if error is not None:
                    log.warning("ledger_delayed", num_closings=len(closings), error=error.message)
                    self._closings[:0] = closings
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._writer = None

    async def _write_or_split(
        self, openings: Sequence[dict[str, Any]], closings: Sequence[dict[str, Any]]
    ) -> TandemError | None:
        """Write rows together; return why that is not possible now. One that is nonsense does not take others along."""
        try:
            await self._database.again(lambda: self._write(openings, closings))
        except IntegrityError as bug:
            if len(openings) + len(closings) == 1:
                log.error("ledger_row_refused", rows=[*openings, *closings], error=str(bug.orig))
                without = [Closing(each["row_id"], "failed", NOTHING_USED, error=REFUSED) for each in closings]
                return await self._write_or_split([], [_row(each, self._database.now_ms()) for each in without])
            for each in openings:
                await self._write_or_split([each], [])
            for each in closings:
                if (error := await self._write_or_split([], [each])) is not None:
                    return error
        except TandemError as error:
            return error
        except Exception as bug:
            log.exception("ledger_broke")
            return InternalError(f"the ledger could not be written: {bug!r}")
        return None

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
