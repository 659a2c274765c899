"""Keeps explanations in the database: written in batches, found by id or listed, cleaned in the background.

Nothing here is in the way of an answer. While the database cannot be reached, a bounded number waits, and what is
beyond the bound is dropped and logged: the ledger has the request's cost in any case.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.explain.explanation import Explanation
from control_plane.storage.database import Database
from control_plane.storage.tables import explanations
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_DOCUMENT_BYTES = 16 * 1024
_MAX_PENDING = 2_000
_MAX_TOGETHER = 16
"""Rows of one transaction: about a millisecond, since the ledger's rows may wait for it."""
_TOGETHER_SECONDS = 0.25
_RETRY_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_CLEAN_SECONDS = 30.0
_MAX_REMOVED = 1_000
"""Rows that one statement removes."""
_HOUR_MS = 3_600_000

_encode = msgspec.json.Encoder().encode


class ExplanationStore:
    """The explanations of all gateways of a database. `run` cleans; `drain` writes what waits."""

    def __init__(self, database: Database, hours: float, max_rows: int) -> None:
        """`hours`: how long explanations are kept. `max_rows`: how many at most, the newest; checked twice a minute."""
        self._database = database
        self._hours = hours
        self._max_rows = max_rows
        self._pending: deque[Explanation] = deque()
        self._num_dropped = 0
        self._num_written = 0
        """Since the table was cleaned."""
        self._writer: asyncio.Task[None] | None = None

    def add(self, explanation: Explanation) -> None:
        """Write an explanation soon."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending.popleft()
            self._num_dropped += 1
        self._pending.append(explanation)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())

    async def drain(self) -> None:
        """Wait until everything is written."""
        while self._writer is not None:
            await asyncio.shield(self._writer)

    async def close(self) -> None:
        """Write what waits, for some seconds at most."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.drain()
        except TimeoutError:
            log.warning("explanations_dropped", num=len(self._pending))
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def run(self) -> None:
        """Remove what is too old or too much, for ever."""
        while True:
            try:
                await self.clean()
            except TandemError as error:
                log.warning("explanations_not_cleaned", error=error.message)
            await asyncio.sleep(_CLEAN_SECONDS)

    async def clean(self) -> None:
        """Remove what is too old, and the oldest beyond the most rows."""
        before_ms = self._database.now_ms() - int(self._hours * _HOUR_MS)
        while await self._database.run(lambda connection: _remove_before(connection, before_ms)) == _MAX_REMOVED:
            pass  # others use the database between two statements
        while await self._database.run(lambda connection: _remove_beyond(connection, self._max_rows)) == _MAX_REMOVED:
            pass
        self._num_written = 0

    # ------------------------------------------------------------------------------------------------------ reading

    async def find(self, request_id: str, account: str | None) -> bytes | None:
        """Return the JSON of an explanation; None if there is none, or another account's. Raise Unavailable.

        `account`: None for all accounts.
        """
        query = sa.select(explanations.c.document).where(explanations.c.request_id == request_id)
        if account is not None:
            query = query.where(explanations.c.account == account)
        found = await self._database.run(lambda connection: connection.execute(query).scalar(), single=True)
        return None if found is None else str(found).encode()

    async def newest(self, limit: int, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return rows of the list, the newest first. `wanted`: values of the columns account, model and state."""
        query = sa.select(explanations.c.summary).order_by(explanations.c.created_ms.desc()).limit(limit)
        for column, value in wanted.items():
            query = query.where(explanations.c[column] == value)
        rows = await self._database.run(lambda connection: connection.execute(query).scalars().all(), single=True)
        return [msgspec.json.decode(row) for row in rows]

    # ------------------------------------------------------------------------------------------------------ writing

    async def _write_all(self) -> None:
        try:
            while self._pending:
                await asyncio.sleep(_TOGETHER_SECONDS)
                await self._write_pending()
        finally:
            self._writer = None

    async def _write_pending(self) -> None:
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(_MAX_TOGETHER, len(self._pending)))]
            try:
                await self._write(batch)
            except TandemError as error:
                self._put_back(batch)
                log.warning("explanations_delayed", num_waiting=len(self._pending), error=error.message)
                await asyncio.sleep(_RETRY_SECONDS)
                return
            except IntegrityError as error:
                log.warning("explanations_refused", num=len(batch), error=type(error.orig).__name__)
        if self._num_dropped:
            log.warning("explanations_dropped", num=self._num_dropped)
            self._num_dropped = 0
        if self._num_written >= max(1, self._max_rows // 10):
            await self.clean()

    def _put_back(self, batch: Sequence[Explanation]) -> None:
        room = max(0, _MAX_PENDING - len(self._pending))
        self._num_dropped += max(0, len(batch) - room)
        self._pending.extendleft(reversed(batch[len(batch) - min(room, len(batch)) :]))

    async def _write(self, batch: Sequence[Explanation]) -> None:
        insert = self._database.insert(explanations).on_conflict_do_nothing()
        rows = [_row(explanation) for explanation in batch]
        await self._database.with_retry(
            lambda: self._database.run(lambda connection: _insert(connection, insert, rows))
        )
        self._num_written += len(rows)


def _insert(connection: sa.Connection, insert: Any, rows: list[dict[str, Any]]) -> None:
    connection.execute(insert, rows)


def _row(explanation: Explanation) -> dict[str, Any]:
    summary = explanation.summary
    return {
        "request_id": summary.id,
        "account": summary.account,
        "model": summary.model,
        "state": summary.state,
        "created_ms": summary.started_ms,
        "summary": _encode(summary.to_json()).decode(),
        "document": document_of(explanation).decode(),
    }


def document_of(explanation: Explanation) -> bytes:
    """Return the JSON of an explanation, in 16 KiB at most.

    Texts are cut, then candidates, hashes and phases are left out.
    """
    value = explanation.to_json()
    document = _encode(value)
    if len(document) <= MAX_DOCUMENT_BYTES:
        return document
    if value["texts"] is not None:
        excess = len(document) - MAX_DOCUMENT_BYTES
        value["texts"] = _cut_texts(value["texts"], excess)
        document = _encode(value)
        if len(document) <= MAX_DOCUMENT_BYTES:
            return document
        value["texts"] = None
    if value["route"] is not None:
        value["route"]["candidates"] = [each for each in value["route"]["candidates"] if each["is_chosen"]]
    document = _encode(value)
    if len(document) <= MAX_DOCUMENT_BYTES:
        return document
    value["prompt_blocks"] = None
    value["phases"], value["moves"] = value["phases"][:4], value["moves"][:4]
    return _encode(value)


def _cut_texts(texts: dict[str, str], excess_bytes: int) -> dict[str, str]:
    """Return texts that are shorter by `excess_bytes` of JSON or more, the longer one first."""
    sizes = {name: len(_encode(text)) for name, text in texts.items()}
    most = max(0, sum(sizes.values()) - excess_bytes - 64)
    share = max(most // 2, most - min(sizes.values()))
    return {name: _cut_text(text, share) for name, text in texts.items()}


def _cut_text(text: str, max_bytes: int) -> str:
    """Return the beginning of a text that takes at most `max_bytes` as JSON."""
    while text and len(_encode(text)) > max_bytes:
        text = text[: min(len(text) - 1, len(text) * max_bytes // len(_encode(text)))]
    return text


_remove = sa.delete(explanations)


def _remove_before(connection: sa.Connection, before_ms: int) -> int:
    old = sa.select(explanations.c.request_id).where(explanations.c.created_ms < before_ms).limit(_MAX_REMOVED)
    return connection.execute(_remove.where(explanations.c.request_id.in_(old))).rowcount


def _remove_beyond(connection: sa.Connection, max_rows: int) -> int:
    """Remove the oldest of the rows beyond the bound; return how many."""
    num_rows = connection.execute(sa.select(sa.func.count()).select_from(explanations)).scalar_one()
    excess = min(_MAX_REMOVED, num_rows - max_rows)
    if excess <= 0:
        return 0
    oldest = sa.select(explanations.c.request_id).order_by(explanations.c.created_ms).limit(excess)
    return connection.execute(_remove.where(explanations.c.request_id.in_(oldest))).rowcount
