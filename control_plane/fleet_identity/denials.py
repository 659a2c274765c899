"""The deny list: identities whose certificates are refused although they have not expired.

Rows are numbered in the order of their commits, without gaps that fill later, so whoever has read up to a number misses
none below it. Gateways read new rows twice a second and send them with heartbeat replies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from control_plane.storage.database import Database
from control_plane.storage.tables import denials
from tandem.v1 import control_plane_pb2 as cp
from tandem_runtime.certificates.names import Identity
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

READ_SECONDS = 0.5
_RESTORED_STEP = 1_000_000


@dataclass(frozen=True)
class Denial:
    number: int
    identity: str
    until_ms: int


def add(connection: sa.Connection, identity: str, now_ms: int, until_ms: int) -> int:
    """Append a row and return its number. Raise IntegrityError if another transaction took the number: try again."""
    number = (connection.execute(sa.select(sa.func.max(denials.c.number))).scalar() or 0) + 1
    row = {"number": number, "identity": identity, "denied_ms": now_ms, "until_ms": until_ms}
    connection.execute(sa.insert(denials).values(row))
    return number


def number_of(connection: sa.Connection, identity: str) -> int | None:
    """Return the number under which an identity is denied; None if it is not."""
    wanted = sa.select(denials.c.number).where(denials.c.identity == identity).limit(1)
    return connection.execute(wanted).scalar()


def skip_numbers(connection: sa.Connection, known: int, now_ms: int) -> None:
    """Continue far above `known`, a backup's last number: processes may have heard of later rows that are lost."""
    row = {"number": known + _RESTORED_STEP, "identity": "", "denied_ms": now_ms, "until_ms": now_ms}
    connection.execute(sa.insert(denials).values(row))


def read_since(connection: sa.Connection, number: int, now_ms: int) -> tuple[int, list[Denial]]:
    """Return the last number, and the rows above `number` that still matter."""
    last = connection.execute(sa.select(sa.func.max(denials.c.number))).scalar() or 0
    if last == number:
        return last, []
    matters = (denials.c.number > number) & (denials.c.until_ms > now_ms) & (denials.c.identity != "")
    wanted = sa.select(denials.c.number, denials.c.identity, denials.c.until_ms).where(matters)
    rows = connection.execute(wanted.order_by(denials.c.number)).all()
    return last, [Denial(*row) for row in rows]


def delete_old(connection: sa.Connection, now_ms: int) -> None:
    """Delete rows that deny nothing any more, but never the last: its number counts."""
    last = sa.select(sa.func.max(denials.c.number)).scalar_subquery()
    connection.execute(sa.delete(denials).where((denials.c.until_ms < now_ms) & (denials.c.number < last)))


class DenyListReader:
    """One gateway's copy of the deny list. While the database is away, the last copy stands."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._denials: tuple[Denial, ...] = ()
        self._is_behind = False
        self._listeners: list[Callable[[], None]] = []
        self.number = 0

    def listen(self, on_new: Callable[[], None]) -> None:
        """Call `on_new` on the event loop after each reading of new rows."""
        self._listeners.append(on_new)

    async def refresh(self) -> bool:
        """Read new rows; return whether there were any."""
        last, new = await self._database.run(
            lambda connection: read_since(connection, self.number, self._database.now_ms()), single=True
        )
        if last < self.number:  # the database was replaced by an older one: keep what is known, and read all of it
            self.number = 0
            return await self.refresh()
        now_ms = self._database.now_ms()
        self._denials = (*(each for each in self._denials if each.until_ms > now_ms), *new)
        self.number = last
        for listener in self._listeners if new else ():
            listener()
        return bool(new)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            started = time.monotonic()
            try:
                await self.refresh()
                self._is_behind = False
            except TandemError as error:
                if not self._is_behind:
                    log.warning("deny_list_not_read", error=error.message, number=self.number)
                self._is_behind = True
            await asyncio.sleep(max(0.0, started + READ_SECONDS - time.monotonic()))

    def has(self, identity: Identity) -> bool:
        """Return whether `identity` is denied."""
        return any(each.identity == identity.uri for each in self._denials)

    def since(self, number: int) -> cp.DenyList:
        """Return what a process lacks that has read up to `number`: all, if its numbers are not ours."""
        now_ms = self._database.now_ms()
        known = number if number <= self.number else 0
        denied = [each for each in self._denials if each.number > known and each.until_ms > now_ms]
        return cp.DenyList(number=self.number, ids=[Identity.parse(each.identity).id for each in denied])
