"""Compares the ledger with what HTTP clients received: who pays has an answer, and who has an answer pays once.

An answer is free for its client if its gateway was killed, before the end of the row was written or of the answer. One
that is not streamed is paid for and lost if its gateway was killed between the end of the row and the first byte: the
client knows only that the connection broke.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import gateways, ledger
from tests.chaos.http_client import HttpStreamRecord
from tests.system.fleet import Fleet

_POLL_SECONDS = 0.5


class LedgerBooks:
    """Of one run; `begin` comes before the clients, `mistakes` after them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._earlier: set[str] = set()
        self.num_free = 0
        """Whole answers whose gateway was killed before it had closed their rows."""
        self.num_lost = 0
        """Answers whose gateway was killed after it had closed their rows, and before it sent a byte."""

    async def begin(self) -> None:
        """Remember the rows of requests before the clients'."""
        self._earlier = {row.request_id for row in (await self._rows())[0]}

    async def mistakes(self, records: Sequence[HttpStreamRecord], num_cut_off: int, seconds: float) -> list[str]:
        """Return what is wrong in the ledger after `seconds` at most: rows of lost gateways are closed by others.

        `num_cut_off` requests have no record: the end of the run has cut them off.
        """
        deadline = time.monotonic() + seconds
        while True:
            rows, living = await self._rows()
            is_open = any(row.closed_ms is None for row in rows)
            if not is_open or time.monotonic() > deadline:
                new = {row.request_id: row for row in rows if row.request_id not in self._earlier}
                return list(self._mistakes(new, living, records, num_cut_off))
            await asyncio.sleep(_POLL_SECONDS)

    async def living(self) -> set[str]:
        """Return the incarnations of gateways that live, by the database."""
        return (await self._rows())[1]

    async def _rows(self) -> tuple[list[Any], set[str]]:
        """Return all rows, and the incarnations of gateways that live."""
        database = Database(database_url(self._fleet.settings.database_url, Path(self._fleet.settings.state_dir)))
        try:
            async with database.each() as connection:
                rows = list(await connection.execute(sa.select(ledger)))
                alive = await connection.execute(sa.select(gateways).where(gateways.c.ended_ms.is_(None)))
            # One that died while its clock was ahead is not missed before that time.
            latest_ms = database.now_ms() + 1000
            return rows, {row.incarnation for row in alive if row.seen_ms <= latest_ms}
        finally:
            await database.close()

    def _mistakes(
        self, rows: dict[str, Any], living: set[str], records: Sequence[HttpStreamRecord], num_cut_off: int
    ) -> Iterator[str]:
        for record in records:
            for request_id in record.broken_ids:
                row = rows.pop(request_id, None)
                if row is None or not _is_cut_off(row, living, record):
                    yield f"{request_id} was cut off by the end of its gateway: {row}"
            row = rows.pop(record.request_id, None)
            if not record.failure and (why := self._wrong(row, living, record)):
                yield f"{record.request_id}: {why}: {row}"
        for row in rows.values():
            if row.closed_ms is None and row.gateway in living:
                yield f"open: {row}"
        strangers = [row for row in rows.values() if row.num_completion_tokens]
        lost = [row for row in strangers if row.gateway not in living and row.status == "finished"]
        if len(lost) <= sum(record.num_unreached for record in records):
            self.num_lost = len(lost)
            strangers = [row for row in strangers if row not in lost]
        if len(strangers) > num_cut_off:
            yield from (f"nobody has this answer, or {num_cut_off} of these: {row}" for row in strangers)

    def _wrong(self, row: Any, living: set[str], record: HttpStreamRecord) -> str:
        """Return what is wrong with the row of an answer that is whole, or that its client left."""
        if row is None:
            return "no row"
        is_finished = (row.status, row.error) == ("finished", "")  # vectors have no tokens
        if row.gateway not in living and row.num_completion_tokens == 0 and not is_finished:
            self.num_free += 1
            return ""
        if row.closed_ms is None:
            return "open"
        if record.has_left:
            is_right = row.num_completion_tokens <= record.question.num_completion_tokens
            return "" if is_right else "more tokens than the answer has"
        found = row.status, row.error, row.num_completion_tokens
        return "" if found == ("finished", "", record.question.num_completion_tokens) else "not the whole answer"


def _is_cut_off(row: Any, living: set[str], record: HttpStreamRecord) -> bool:
    """Return whether a row may be that of an answer that broke: not billed, or the answer had left as a whole."""
    is_whole = row.num_completion_tokens == record.question.num_completion_tokens
    return row.gateway not in living and (row.num_completion_tokens == 0 or (row.status == "finished" and is_whole))
