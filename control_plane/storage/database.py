"""How does a process reach its database, and what does it say when it cannot?"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_STATEMENT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
"""So long after a failure nobody tries again: those who call meanwhile are told at once."""


class Database:
    """An engine for SQLite or PostgreSQL that speaks of failures in our words; one per process and event loop."""

    def __init__(self, url: URL) -> None:
        self.is_sqlite = url.get_backend_name() == "sqlite"
        if self.is_sqlite and url.database is not None:
            _make_private(Path(url.database))
        self.name = url.render_as_string(hide_password=True)
        self._engine = _engine(url, is_sqlite=self.is_sqlite)
        self._thread = _SqliteThread(url) if self.is_sqlite else None
        single = {_SINGLE: True} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._singles = self._engine.execution_options(**single)
        self._down_until = 0.0
        self._offset_seconds = 0.0
        self.problem = ""
        """Why it could not be used when it was last tried, for its operator alone; "" if it could."""

    def now(self) -> float:
        """Return the time, Unix seconds: by the database's clock, so that all gateways mean the same."""
        return time.time() + self._offset_seconds

    def now_ms(self) -> int:
        return round(self.now() * 1000)

    async def set_clock(self) -> None:
        """Compare our clock with the database's; half of the way there and back is how wrong it may be."""
        if self.is_sqlite:
            return
        async with self.each() as connection:
            before = time.time()
            theirs = await connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())::float8"))
            assert isinstance(theirs, float), "PostgreSQL has a clock"
            self._offset_seconds = theirs - (before + time.time()) / 2

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that ends with the block. On SQLite it takes the write lock at once.

        Raises Unavailable if the database cannot be reached or breaks off, InvalidRequest for a value that it cannot
        hold; IntegrityError passes.
        """
        with self._translated():
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def each(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection on which each statement is a transaction of its own. Raises Unavailable."""
        with self._translated():
            async with self._singles.connect() as connection:
                yield connection

    async def run(self, work: Callable[[sa.Connection], T], *, single: bool = False) -> T:
        """Do what is on a request's way in one transaction, or, `single`, each statement as one of its own.

        A driver for asyncio goes to SQLite's thread and back with every step of a statement; here all of `work` goes at
        once, which is several times sooner. Raises as `begin` does.
        """
        with self._translated():
            if self._thread is not None:
                return await self._thread.run(work, single=single)
            async with self._singles.connect() if single else self._engine.begin() as connection:
                return await connection.run_sync(work)

    async def again(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something that may be done twice; once more if a connection turned out to be dead."""
        try:
            return await work()
        except _Broken:
            self._down_until = 0.0
            return await work()

    def insert(self, table: sa.Table) -> Any:
        """Return the dialect's INSERT, which knows `on_conflict_do_nothing`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()
        await self._engine.dispose()

    def check(self) -> None:
        """Raise Unavailable if it could not be reached a moment ago."""
        if time.monotonic() < self._down_until:
            raise Unavailable("the database could not be reached just now; try again", **_SOON)

    def _translated(self) -> _Translation:
        self.check()
        return _Translation(self)

    def failed(self, error: BaseException) -> TandemError:
        """Return what a caller is told; which database it is, and the driver's words, are for the log."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        text = f"the database {self.name} cannot be used: {str(cause) or type(cause).__name__}"
        if _is_value_refused(error):
            log.warning("database_refused_a_value", database=self.name, error=str(cause))
            return InvalidRequest("the database cannot hold a value of this request; leave out characters such as NUL")
        log.warning("database_failed", database=self.name, error=str(cause) or type(cause).__name__)
        if isinstance(error, PoolTimeoutError):  # a queue of our own: whoever has the connections may be well served
            return Unavailable("too many requests wait for the database; try again", **_SOON)
        if _is_away(error):
            self._down_until = time.monotonic() + _PAUSE_SECONDS
            self.problem = text
        is_broken = isinstance(error, DBAPIError) and error.connection_invalidated
        return (_Broken if is_broken else Unavailable)("the database cannot be used; try again", **_SOON)


def _is_value_refused(error: BaseException) -> bool:
    """Whether a statement's values are at fault: PostgreSQL's class 22, or what its driver cannot even send."""
    if not isinstance(error, DBAPIError) or error.statement is None:
        return False
    return _sqlstate(error).startswith("22") or isinstance(getattr(error.orig, "__cause__", None), ValueError)


def _is_away(error: BaseException) -> bool:
    """Whether nobody else could use the database now either; not so if only this statement has failed."""
    if not isinstance(error, DBAPIError) or error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    state = _sqlstate(error)
    return state.startswith(_AWAY) if state else isinstance(error, OperationalError)  # SQLite has no states


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


_AWAY = ("08", "25006", "28", "3D", "40", "53", "57", "58")
"""SQLSTATEs of connections, standbys, logins, missing databases, conflicts, resources, operators, the machine."""

_SINGLE = "tandem_single_statements"
_SOON: dict[str, Any] = {"retry_after_seconds": 1.0}


class _SqliteThread:
    """One connection, and the thread that uses it."""

    def __init__(self, url: URL) -> None:
        self._engine = sa.create_engine(url.set(drivername="sqlite+pysqlite"), pool_size=1, max_overflow=0)
        self._singles = self._engine.execution_options(**{_SINGLE: True})
        _listen(self._engine)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")

    async def run(self, work: Callable[[sa.Connection], T], *, single: bool) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work, single)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.dispose)
        self._executor.shutdown()

    def _run(self, work: Callable[[sa.Connection], T], single: bool) -> T:
        with self._singles.connect() if single else self._engine.begin() as connection:
            return work(connection)


class _Broken(Unavailable):
    """A connection of the pool was dead; a new one may well be possible."""


class _Translation:
    """Turns what drivers raise inside its block into our own errors."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._database.problem = ""
        if error is None or isinstance(error, IntegrityError | asyncio.CancelledError):
            return
        if isinstance(error, DBAPIError | PoolTimeoutError | OSError):  # OSError: of asyncpg as it connects
            raise self._database.failed(error) from error


def _make_private(path: Path) -> None:
    """Make a file that only its user may read, before SQLite makes one that everybody may."""
    try:
        path.touch(mode=0o600, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"cannot keep the database in {path}: {error}; set --state-dir or --database-url"
        ) from error


def database_url(configured: str, state_dir: Path) -> URL:
    """Return where the database is: as configured, else a SQLite file in the state folder. Raises InvalidRequest."""
    if not configured:
        return URL.create("sqlite+aiosqlite", database=str(state_dir / "tandem.db"))
    try:
        url = make_url(configured)
    except ArgumentError as error:
        raise InvalidRequest(f"--database-url is no URL; give {_FORMS}") from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    if url.drivername not in (*drivers, *drivers.values()):
        raise InvalidRequest(f"--database-url names {url.drivername}, which is not supported; give {_FORMS}")
    if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
        raise InvalidRequest("--database-url names a database in memory, which ends with its connection; give a file")
    return url.set(drivername=drivers.get(url.drivername, url.drivername))


_FORMS = "postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:////absolute/path"


def _engine(url: URL, *, is_sqlite: bool) -> AsyncEngine:
    if not is_sqlite:
        return create_async_engine(
            url,
            pool_size=8,
            max_overflow=0,
            pool_timeout=_STATEMENT_SECONDS,
            connect_args={"timeout": _CONNECT_SECONDS, "command_timeout": _STATEMENT_SECONDS},
        )
    engine = create_async_engine(url, pool_size=3, max_overflow=0, pool_timeout=_STATEMENT_SECONDS)
    _listen(engine.sync_engine)
    return engine


def _listen(engine: sa.Engine) -> None:
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_immediate)


def _prepare_sqlite(connection: Any, record: ConnectionPoolEntry) -> None:
    """Readers never wait for the writer (WAL); a commit survives the process, though not a power cut at once."""
    connection.isolation_level = None  # the driver begins no transactions of its own: see _begin_immediate
    cursor = connection.cursor()
    for pragma in ("busy_timeout = 30000", "synchronous = NORMAL", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    try:
        cursor.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        # SQLite does not wait here. The mode is the file's: whoever has it locked, the first time, is setting the same.
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
    cursor.close()


def _begin_immediate(connection: sa.Connection) -> None:
    """Take the write lock first: a transaction that reads before it writes could not get it later."""
    if not connection.get_execution_options().get(_SINGLE):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
