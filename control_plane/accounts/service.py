"""Creates, runs and closes the parts of a gateway that concern accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy.engine import URL

from control_plane.accounts.authenticator import Authenticator
from control_plane.accounts.incarnations import Incarnations
from control_plane.accounts.ledger import Ledger
from control_plane.accounts.limiter import Limiter
from control_plane.accounts.metering import Metering
from control_plane.accounts.prices import PriceTable
from control_plane.accounts.store import AccountStore
from control_plane.accounts.usage import UsageReport
from control_plane.storage.database import REPORT_SECONDS, Database
from control_plane.storage.migrate import migrate
from tandem_runtime import identity
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_SAVE_USES_SECONDS = 30.0
_DRAIN_SECONDS = 15.0


class Accounts:
    """Owns the database of one gateway process. Call `open` first, and `close` after the last request."""

    def __init__(
        self,
        url: URL,
        incarnation: str = "",
        prices: PriceTable | None = None,
        gone_seconds: float = 30.0,
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        self.database = Database(url, report_seconds)
        self.store = AccountStore(self.database)
        self.authenticator = Authenticator(self.store)
        incarnation = incarnation or identity.new_incarnation()
        limiter = Limiter(self.database, incarnation)
        self.metering = Metering(limiter, Ledger(self.database, incarnation), prices or PriceTable())
        self.incarnations = Incarnations(self.database, incarnation, limiter, gone_seconds)
        self.usage = UsageReport(self.database)

    async def open(self) -> None:
        """Migrate the tables and register this gateway. Raise InvalidRequest if the database cannot be used."""
        try:
            await migrate(self.database)
            await self.database.set_clock()
            await self.incarnations.begin()
            await self.incarnations.sweep()
        except Unavailable as error:
            raise InvalidRequest(f"{self.database.problem or error.message}; see --database-url") from error

    async def check_exposed(self, listen: str) -> None:
        """Raise InvalidRequest if no account exists: the gateway then may not listen beyond loopback."""
        if await self.authenticator.is_open():
            raise InvalidRequest(
                f"--listen {listen} is beyond loopback and there is no account, so anybody could use it; create "
                "one with `python -m control_plane account create NAME` (with the same --database-url or --state-dir), "
                "which prints its token"
            )

    @property
    def loops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What runs in the background until it is cancelled, by name: heartbeats, and saving the use of tokens."""
        return {"gateway-heartbeats": self.incarnations.run, "token-uses": self._save_uses_regularly}

    async def close(self) -> None:
        """Write what is pending. Call this when no request runs."""
        await self._save_uses()
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.metering.drain()
                await self.incarnations.end()
        except (TimeoutError, Unavailable) as error:
            log.error("ledger_not_drained", error=str(error), remedy="another gateway closes open rows as aborted")
        await self.database.close()

    async def _save_uses_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_USES_SECONDS)
            await self._save_uses()

    async def _save_uses(self) -> None:
        used, self.authenticator.used_ms = self.authenticator.used_ms, {}
        if not used:
            return
        try:
            await self.store.used(used)
        except Unavailable as error:
            self.authenticator.used_ms = used | self.authenticator.used_ms
            log.warning("token_use_not_saved", error=error.message)
