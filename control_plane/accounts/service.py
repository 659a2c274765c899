"""What does a gateway need for accounts, and how do its parts live together?"""

from __future__ import annotations

import asyncio

from sqlalchemy.engine import URL

from control_plane.accounts.authenticator import Authenticator
from control_plane.accounts.incarnations import Incarnations
from control_plane.accounts.ledger import Ledger
from control_plane.accounts.limiter import Limiter
from control_plane.accounts.metering import Metering
from control_plane.accounts.prices import PriceTable
from control_plane.accounts.store import AccountStore
from control_plane.accounts.usage import UsageReport
from control_plane.storage.database import Database
from control_plane.storage.migrate import migrate
from tandem_runtime import identity
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_USED_SECONDS = 30.0
_DRAIN_SECONDS = 15.0


class Accounts:
    """Owns the database of one gateway process; `open` before anything else, `close` after the last request."""

    def __init__(
        self,
        url: URL,
        incarnation: str = "",
        prices: PriceTable | None = None,
        gone_seconds: float = 30.0,
    ) -> None:
        self.database = Database(url)
        self.store = AccountStore(self.database)
        self.authenticator = Authenticator(self.store)
        incarnation = incarnation or identity.new_incarnation()
        limiter = Limiter(self.database, incarnation)
        self.metering = Metering(limiter, Ledger(self.database, incarnation), prices or PriceTable())
        self.incarnations = Incarnations(self.database, incarnation, limiter, gone_seconds)
        self.usage = UsageReport(self.database)

    async def open(self) -> None:
        """Make the tables what they must be, and begin a life. Raises InvalidRequest if the database cannot be used."""
        try:
            await migrate(self.database)
            await self.database.set_clock()
            await self.incarnations.begin()
            await self.incarnations.sweep()
        except Unavailable as error:
            raise InvalidRequest(f"{self.database.problem or error.message}; see --database-url") from error

    async def check_exposed(self, listen: str) -> None:
        """Refuse to serve beyond loopback as long as everybody may do everything. Raises InvalidRequest."""
        if await self.authenticator.is_open():
            raise InvalidRequest(
                f"--listen {listen} is beyond loopback and there is no account, so anybody could use it; make one with "
                "`python -m control_plane account create NAME` (with the same --database-url or --state-dir), which "
                "prints its token"
            )

    async def run(self) -> None:
        """Do what is due now and then, for as long as the process lives."""
        await asyncio.gather(self.incarnations.run(), self._note_uses())

    async def close(self) -> None:
        """Write what has not been written; to be called when no request runs any more."""
        await self._note_used()
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.metering.drain()
                await self.incarnations.end()
        except (TimeoutError, Unavailable) as error:
            log.error("ledger_not_drained", error=str(error), remedy="another gateway closes what is open as aborted")
        await self.database.close()

    async def _note_uses(self) -> None:
        while True:
            await asyncio.sleep(_USED_SECONDS)
            await self._note_used()

    async def _note_used(self) -> None:
        used, self.authenticator.used_ms = self.authenticator.used_ms, {}
        if not used:
            return
        try:
            await self.store.used(used)
        except Unavailable as error:
            self.authenticator.used_ms = used | self.authenticator.used_ms
            log.warning("token_use_not_saved", error=error.message)
