"""Reaches the database, SQLite or PostgreSQL, and translates its failures."""

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
"""Seconds after a failure in which calls fail at once, without an attempt."""


class Database:
    """A database, SQLite or PostgreSQL, that raises our own errors; one per process and event loop."""

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
        """The last failure, for the operator only; "" after a success."""

    def now(self) -> float:
        """Return the time in Unix seconds by the database's clock, so that all gateways agree."""
        return time.time() + self._offset_seconds

    def now_ms(self) -> int:
        return round(self.now() * 1000)

    async def set_clock(self) -> None:
        """Measure our clock's offset from the database's. The error is at most half of the round trip."""
        if self.is_sqlite:
            return
        async with self.each() as connection:
            before = time.time()
            database_seconds = await connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())::float8"))
            assert isinstance(database_seconds, float), "PostgreSQL has a clock"
            self._offset_seconds = database_seconds - (before + time.time()) / 2

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that ends with the block. On SQLite it takes the write lock at once.

        Raise Unavailable if the database cannot be reached or fails, InvalidRequest for a value that it cannot store.
        IntegrityError is not translated.
        """
        with self._translated():
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def each(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection on which each statement is its own transaction. Raise Unavailable."""
        with self._translated():
            async with self._singles.connect() as connection:
                yield connection

    async def run(self, work: Callable[[sa.Connection], T], *, single: bool = False) -> T:
        """Run `work` in one transaction or, with `single`, with one transaction per statement. Raise as `begin` does.

        This is for a request's hot path. An asyncio driver switches to SQLite's thread and back for every step of a
        statement; this switches once for all of `work`, which is several times faster.
        """
        with self._translated():
            if self._thread is not None:
                return await self._thread.run(work, single=single)
            async with self._singles.connect() if single else self._engine.begin() as connection:
                return await connection.run_sync(work)

    async def with_retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which must be idempotent, and run it again if its connection was dead."""
        try:
            return await work()
        except _DeadConnection:
            self._down_until = 0.0
            return await work()

    def insert(self, table: sa.Table) -> Any:
        """Return the dialect's INSERT, which has `on_conflict_do_nothing`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()
        await self._engine.dispose()

    def check(self) -> None:
        """Raise Unavailable if the database failed a moment ago."""
        if time.monotonic() < self._down_until:
            raise Unavailable("the database could not be reached; try again", **_SOON)

    def _translated(self) -> _Translation:
        self.check()
        return _Translation(self)

    def failed(self, error: BaseException) -> TandemError:
        """Return the error for a client, and log the database's name and the driver's message."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        text = f"the database {self.name} cannot be used: {str(cause) or type(cause).__name__}"
        if _is_value_refused(error):
            log.warning("database_value_refused", database=self.name, error=str(cause))
            return InvalidRequest("the database cannot hold a value of this request; leave out characters such as NUL")
        log.warning("database_failed", database=self.name, error=str(cause) or type(cause).__name__)
        if isinstance(error, PoolTimeoutError):  # our own queue is full; the database itself may be well
            return Unavailable("too many requests wait for the database; try again", **_SOON)
        if _is_unavailable(error):
            self._down_until = time.monotonic() + _PAUSE_SECONDS
            self.problem = text
        is_dead = isinstance(error, DBAPIError) and error.connection_invalidated
        return (_DeadConnection if is_dead else Unavailable)("the database cannot be used; try again", **_SOON)


def _is_value_refused(error: BaseException) -> bool:
    """Return whether a statement's values are at fault: PostgreSQL's class 22, or values its driver cannot send."""
    if not isinstance(error, DBAPIError) or error.statement is None:
        return False
    return _sqlstate(error).startswith("22") or isinstance(getattr(error.orig, "__cause__", None), ValueError)


def _is_unavailable(error: BaseException) -> bool:
    """Return whether the database is unavailable for all, not only for this statement."""
    if not isinstance(error, DBAPIError) or error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    state = _sqlstate(error)
    return (
        state.startswith(_UNAVAILABLE_STATES) if state else isinstance(error, OperationalError)
    )  # SQLite has no states


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


_UNAVAILABLE_STATES = ("08", "25006", "28", "3D", "40", "53", "57", "58")
"""SQLSTATE prefixes: connections, standbys, logins, missing databases, conflicts, resources, operators, the machine."""

_SINGLE = "tandem_single_statements"
_SOON: dict[str, Any] = {"retry_after_seconds": 1.0}


class _SqliteThread:
    """One SQLite connection and its thread."""

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


class _DeadConnection(Unavailable):
    """A pooled connection was dead; a new connection may succeed."""


class _Translation:
    """Translates errors of drivers inside its block into our own errors."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._database.problem = ""
        if error is None or isinstance(error, IntegrityError | asyncio.CancelledError):
            return
        if isinstance(error, DBAPIError | PoolTimeoutError | OSError):  # asyncpg raises OSError while connecting
            raise self._database.failed(error) from error


def _make_private(path: Path) -> None:
    """Create the file with mode 0600, before SQLite creates it with a wider mode."""
    try:
        path.touch(mode=0o600, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"cannot keep the database in {path}: {error}; set --state-dir or --database-url"
        ) from error


def database_url(configured: str, state_dir: Path) -> URL:
    """Return the configured database's URL, else that of a SQLite file in the state folder. Raise InvalidRequest."""
    if not configured:
        return URL.create("sqlite+aiosqlite", database=str(state_dir / "tandem.db"))
    try:
        url = make_url(configured)
    except ArgumentError as error:
        raise InvalidRequest(f"--database-url is not a URL; give {_FORMS}") from error
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
    if url.drivername not in (*drivers, *drivers.values()):
        raise InvalidRequest(f"--database-url names {url.drivername}, which is not supported; give {_FORMS}")
    if url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:"):
        raise InvalidRequest(
            "--database-url names a database in memory, which does not outlive its connection; give a file"
        )
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
    """Set WAL: readers never wait for the writer. A commit survives the process, but perhaps not a power cut."""
    connection.isolation_level = None  # the driver must not begin transactions: see _begin_immediate
    cursor = connection.cursor()
    for pragma in ("busy_timeout = 30000", "synchronous = NORMAL", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    try:
        cursor.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        # SQLite does not wait here. The mode belongs to the file: the process that has the lock sets the same mode.
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
    cursor.close()


def _begin_immediate(connection: sa.Connection) -> None:
    """Take the write lock first: a transaction that reads before it writes might not get the lock later."""
    if not connection.get_execution_options().get(_SINGLE):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
