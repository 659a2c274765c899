"""Keeps events in the database: numbered in the order of commits, read in pages, cleaned by age and number.

A reader that asks for what comes after a number misses nothing: the numbers have no gaps, and a number is visible only
when all smaller ones are. The primary key sees to that: of two gateways that take the same numbers, one is refused and
takes the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.events.event import Event
from control_plane.storage.database import Database
from control_plane.storage.tables import fleet_events
from tandem_runtime.errors import Unavailable

MAX_TOGETHER = 500
"""Events of one transaction."""
MAX_PAGE = 1_000
_MAX_ATTEMPTS = 20
_MAX_REMOVED = 1_000
_DAY_MS = 86_400_000

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Wanted:
    """Which events to read; "" for any."""

    kind: str = ""
    severity: str = ""
    worker: str = ""
    """The worker's id, or its name."""


class EventStore:
    """The events of all gateways of a database."""

    def __init__(self, database: Database, days: float, max_rows: int) -> None:
        self._database = database
        self._days = days
        self._max_rows = max_rows

    async def write(self, events: Sequence[Event]) -> None:
        """Write events under the next numbers. Raise Unavailable."""
        rows = [_row(event) for event in events]

        def write(connection: sa.Connection) -> None:
            last = connection.execute(_LAST).scalar() or 0
            connection.execute(sa.insert(fleet_events), [{**row, "number": last + n} for n, row in enumerate(rows, 1)])

        for _ in range(_MAX_ATTEMPTS):
            try:
                return await self._database.run(write)
            except IntegrityError:  # another gateway has taken these numbers
                continue
        raise Unavailable("other gateways write events all the time; these are written later", retry_after_seconds=1.0)

    async def last_number(self) -> int:
        """Return the number of the newest event; 0 if there is none. Raise Unavailable."""
        return await self._database.run(lambda connection: connection.execute(_LAST).scalar() or 0, single=True)

    async def after(self, number: int, limit: int = MAX_PAGE, wanted: Wanted | None = None) -> list[Event]:
        """Return the first events after a number, the oldest first. Raise Unavailable."""
        query = _matching(wanted).where(fleet_events.c.number > number).order_by(fleet_events.c.number).limit(limit)
        return await self._read(query)

    async def newest(self, limit: int, wanted: Wanted | None = None) -> list[Event]:
        """Return the newest events, the newest last. Raise Unavailable."""
        query = _matching(wanted).order_by(fleet_events.c.number.desc()).limit(limit)
        return (await self._read(query))[::-1]

    async def clean(self) -> None:
        """Delete what is too old, and the oldest beyond the most rows, never the newest: its number counts."""
        before_ms = self._database.now_ms() - int(self._days * _DAY_MS)

        def clean(connection: sa.Connection) -> int:
            last = connection.execute(_LAST).scalar() or 0
            first = sa.select(fleet_events.c.number, fleet_events.c.time_ms).order_by(fleet_events.c.number)
            num_old = 0
            for row in connection.execute(first.limit(_MAX_REMOVED)):
                if row.number == last or not (row.time_ms < before_ms or row.number <= last - self._max_rows):
                    break
                num_old, number = num_old + 1, row.number
            if num_old:
                connection.execute(sa.delete(fleet_events).where(fleet_events.c.number <= number))
            return num_old

        while await self._database.run(clean) == _MAX_REMOVED:
            pass  # others use the database between two statements

    async def _read(self, query: sa.Select[Any]) -> list[Event]:
        rows = await self._database.run(lambda connection: connection.execute(query).all(), single=True)
        return [_event(row.number, row.document) for row in rows]


_LAST = sa.select(sa.func.max(fleet_events.c.number))


def _matching(wanted: Wanted | None) -> sa.Select[Any]:
    query: sa.Select[Any] = sa.select(fleet_events.c.number, fleet_events.c.document)
    if wanted is None:
        return query
    if wanted.kind:
        query = query.where(fleet_events.c.kind == wanted.kind)
    if wanted.severity:
        query = query.where(fleet_events.c.severity == wanted.severity)
    if wanted.worker:
        query = query.where(sa.or_(fleet_events.c.worker == wanted.worker, fleet_events.c.name == wanted.worker))
    return query


def _row(event: Event) -> dict[str, Any]:
    return {
        "time_ms": event.time_ms,
        "kind": event.kind,
        "severity": event.severity,
        "worker": event.worker,
        "name": event.fields.get("name", "") if event.worker else "",
        "document": _encode(event.to_json()).decode(),
    }


def _event(number: int, document: str) -> Event:
    values = msgspec.json.decode(document)
    del values["id"]
    return Event(**values, id=number)
