"""Tracks which gateways are alive, and closes the requests of lost gateways."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from control_plane.accounts.ledger import GATEWAY_LOST
from control_plane.accounts.limiter import Limiter
from control_plane.storage.database import Database
from control_plane.storage.tables import gateways, ledger
from tandem_runtime.errors import Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_BEATS_PER_LIFE = 6
_KEPT_MS = 86_400_000


class Incarnations:
    """Sends this gateway's heartbeats, and cleans up after lost gateways."""

    def __init__(self, database: Database, gateway: str, limiter: Limiter, gone_seconds: float) -> None:
        self._database = database
        self._gateway = gateway
        self._limiter = limiter
        self._gone_seconds = gone_seconds

    async def begin(self) -> None:
        """Register this incarnation. Call this before its first ledger row."""
        now_ms = self._database.now_ms()
        async with self._database.begin() as connection:
            values = {"incarnation": self._gateway, "started_ms": now_ms, "seen_ms": now_ms}
            await connection.execute(sa.insert(gateways).values(values))

    async def run(self) -> None:
        """Send heartbeats and sweep until cancelled."""
        while True:
            await asyncio.sleep(self._gone_seconds / _BEATS_PER_LIFE)
            try:
                await self._database.set_clock()
                await self.beat()
                await self.sweep()
            except Unavailable as error:
                log.warning("heartbeat_missed", error=error.message)

    async def beat(self) -> None:
        now_ms = self._database.now_ms()
        async with self._database.begin() as connection:
            mine = sa.update(gateways).where(gateways.c.incarnation == self._gateway)
            was_ended = await connection.scalar(
                sa.select(gateways.c.ended_ms).where(gateways.c.incarnation == self._gateway)
            )
            await connection.execute(mine.values(seen_ms=now_ms, ended_ms=None))
        if was_ended is not None:
            log.warning("gateway_declared_lost", reason="another gateway saw no heartbeat in time")

    async def sweep(self) -> None:
        """Declare gateways without recent heartbeats lost, and close their open rows as aborted."""
        now_ms = self._database.now_ms()
        gone_ms = now_ms - round(self._gone_seconds * 1000)
        async with self._database.begin() as connection:
            is_gone = gateways.c.ended_ms.is_(None) & (gateways.c.seen_ms < gone_ms)
            gone = await connection.execute(
                sa.update(gateways).where(is_gone).values(ended_ms=now_ms).returning(gateways.c.incarnation)
            )
            names = list(gone.scalars())
            alive = sa.select(gateways.c.incarnation).where(gateways.c.ended_ms.is_(None))
            open_rows = ledger.c.closed_ms.is_(None) & ledger.c.gateway.not_in(alive)
            closed = await connection.execute(
                sa.update(ledger).where(open_rows).values(status="aborted", closed_ms=now_ms, error=GATEWAY_LOST)
            )
            await connection.execute(sa.delete(gateways).where(gateways.c.ended_ms < now_ms - _KEPT_MS))
            still_alive = frozenset((await connection.execute(alive)).scalars())
        await self._limiter.forget(still_alive.__contains__)
        if names or closed.rowcount:
            log.warning("gateways_lost", incarnations=names, num_rows=closed.rowcount)

    async def end(self) -> None:
        """Unregister this incarnation, and close its rows that are still open as aborted."""
        now_ms = self._database.now_ms()
        async with self._database.begin() as connection:
            mine = sa.update(gateways).where(gateways.c.incarnation == self._gateway)
            await connection.execute(mine.values(ended_ms=now_ms))
            open_rows = ledger.c.closed_ms.is_(None) & (ledger.c.gateway == self._gateway)
            await connection.execute(
                sa.update(ledger).where(open_rows).values(status="aborted", closed_ms=now_ms, error=GATEWAY_LOST)
            )
