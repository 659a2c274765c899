"""Reaches the database, SQLite or PostgreSQL, and translates its failures.

After a failure of the database itself, calls fail at once for half a second. A statement that is too slow is no such
failure, unless several are in a row. Reports have connections and a time limit of their own, and never cause this.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from tandem_runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded, TandemError, Unavailable
from tandem_runtime.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_STATEMENT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
"""Seconds after a failure in which calls fail at once, without an attempt."""
_MAX_SLOW_STATEMENTS = 3
"""So many slow statements, and no other one between them: the database does not answer at all."""
REPORT_SECONDS = 15.0
_REPORTS_AT_ONCE = 2


class Database:
    """A database, SQLite or PostgreSQL, that raises our own errors; one per process and event loop."""

    def __init__(self, url: URL, report_seconds: float = REPORT_SECONDS) -> None:
        self.is_sqlite = url.get_backend_name() == "sqlite"
        if self.is_sqlite and url.database is not None:
            _make_private(Path(url.database))
        self.name = url.render_as_string(hide_password=True)
        self._engine = _engine(url, is_sqlite=self.is_sqlite)
        self._thread = _SqliteThread(url) if self.is_sqlite else None
        self._report_seconds = report_seconds
        self._report_turns = asyncio.Semaphore(_REPORTS_AT_ONCE)
        self._report_engine = None
        if not self.is_sqlite:
            self._report_engine = _postgres_engine(url, report_seconds + _REPORT_GRACE_SECONDS, _REPORTS_AT_ONCE)
        self._report_thread = _SqliteThread(url) if self.is_sqlite else None
        single = {_SINGLE: True} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._singles = self._engine.execution_options(**single)
        self._down_until = 0.0
        self._num_slow_statements = 0
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
        with self._translated() as attempt:
            async with self._engine.begin() as connection:
                attempt.has_connection = True
                yield connection

    @asynccontextmanager
    async def each(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection on which each statement is its own transaction. Raise Unavailable."""
        with self._translated() as attempt:
            async with self._singles.connect() as connection:
                attempt.has_connection = True
                yield connection

    async def run(self, work: Callable[[sa.Connection], T], *, single: bool = False) -> T:
        """Run `work` in one transaction or, with `single`, with one transaction per statement. Raise as `begin` does.

        This is for a request's hot path. An asyncio driver switches to SQLite's thread and back for every step of a
        statement; this switches once for all of `work`, which is several times faster.
        """
        with self._translated() as attempt:
            if self._thread is not None:
                return await self._thread.run(work, single=single)
            async with self._singles.connect() if single else self._engine.begin() as connection:
                attempt.has_connection = True
                return await connection.run_sync(work)

    async def report(self, work: Callable[[sa.Connection], T]) -> T:
        """Run queries over many rows on a connection that serves nothing else.

        Raise DeadlineExceeded for a query that takes longer than the limit for reports, Overloaded if others do.
        """
        try:
            await asyncio.wait_for(self._report_turns.acquire(), self._report_seconds)
        except TimeoutError as error:
            raise Overloaded(
                f"{_REPORTS_AT_ONCE} reports are running, which is the limit; try again", **_SOON
            ) from error
        try:
            with self._translated(is_report=True) as attempt:
                if self._report_thread is not None:
                    return await self._report_thread.run(work, single=True, limit_seconds=self._report_seconds)
                assert self._report_engine is not None, "either SQLite or PostgreSQL"
                async with self._report_engine.begin() as connection:
                    attempt.has_connection = True
                    # For this transaction only, so that a pooler between us and PostgreSQL may reuse the connection.
                    limit_ms = round(self._report_seconds * 1000)
                    await connection.execute(sa.text(f"SET LOCAL statement_timeout = {limit_ms}"))
                    return await connection.run_sync(work)
        finally:
            self._report_turns.release()

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
        for thread in (self._thread, self._report_thread):
            if thread is not None:
                await thread.close()
        await self._engine.dispose()
        if self._report_engine is not None:
            await self._report_engine.dispose()

    def check(self) -> None:
        """Raise Unavailable if the database failed a moment ago."""
        if time.monotonic() < self._down_until:
            raise Unavailable("the database could not be reached; try again", **_SOON)

    def _translated(self, *, is_report: bool = False) -> _Attempt:
        self.check()
        return _Attempt(self, is_report=is_report)

    def succeeded(self) -> None:
        """The database answers."""
        self.problem = ""
        self._num_slow_statements = 0

    def failed(self, error: BaseException, *, has_connection: bool = False, is_report: bool = False) -> TandemError:
        """Return the error for a client, and log the database's name and the driver's message.

        `has_connection`: the failure is one of a statement, not of connecting.
        """
        if _is_value_refused(error):
            log.warning("database_value_refused", database=self.name, error=_kind(error))
            return InvalidRequest("the database cannot hold a value of this request; leave out characters such as NUL")
        log.warning("database_failed", database=self.name, error=_text(error), is_report=is_report)
        if isinstance(error, PoolTimeoutError):  # our own queue is full; the database itself may be well
            return Unavailable("too many requests wait for the database; try again", **_SOON)
        is_slow = has_connection and _is_slow_statement(error)
        if is_report:
            return self._report_failed(is_slow=is_slow)
        if is_slow:
            self._num_slow_statements += 1
        if self._num_slow_statements >= _MAX_SLOW_STATEMENTS if is_slow else _is_unavailable(error):
            self._down_until = time.monotonic() + _PAUSE_SECONDS
            self.problem = f"the database {self.name} cannot be used: {_text(error)}"
        is_dead = isinstance(error, DBAPIError) and error.connection_invalidated
        return (_DeadConnection if is_dead else Unavailable)("the database cannot be used; try again", **_SOON)

    def _report_failed(self, *, is_slow: bool) -> TandemError:
        if not is_slow:
            return Unavailable("the report could not be read from the database; try again", **_SOON)
        return DeadlineExceeded(
            f"the report took longer than {self._report_seconds:g} s, which is the limit; ask for fewer days, or raise "
            "--report-seconds"
        )


def _kind(error: BaseException) -> str:
    """Return the class of a driver's error and its SQLSTATE: its text may quote a value of a request."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    state = _sqlstate(error) if isinstance(error, DBAPIError) else ""
    return f"{type(cause).__name__} {state}".strip()


def _text(error: BaseException) -> str:
    """Return the first line of a driver's message; the others are details, and may quote rows."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    first, _, _ = str(cause).partition("\n")
    return first or type(cause).__name__


def _is_slow_statement(error: BaseException) -> bool:
    """Return whether a statement took longer than its limit: PostgreSQL's or the driver's, or SQLite's for reports."""
    if isinstance(error, TimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    is_interrupted = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT
    return _sqlstate(error) == "57014" or is_interrupted


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


_UNAVAILABLE_STATES = ("08", "25006", "28", "3D", "53", "57P", "58")
"""SQLSTATE prefixes: connections, standbys, logins, missing databases, resources, shutdowns, the machine.

Conflicts (40) and cancelled statements (57014) concern one statement.
"""

_REPORT_GRACE_SECONDS = 2.0
"""The server ends a report at its limit; the driver waits a little longer for a server that does not."""
_INSTRUCTIONS_PER_LOOK = 20_000
"""Of SQLite's virtual machine: about a millisecond."""
_SINGLE = "tandem_single_statements"
_PRIMARY_CODE = 0xFF
"""The bits of SQLite's extended result codes that name the error itself: https://www.sqlite.org/rescode.html."""
_SOON: dict[str, Any] = {"retry_after_seconds": 1.0}


class _SqliteThread:
    """One SQLite connection and its thread."""

    def __init__(self, url: URL) -> None:
        self._engine = sa.create_engine(
            url.set(drivername="sqlite+pysqlite"), pool_size=1, max_overflow=0, hide_parameters=True
        )
        self._singles = self._engine.execution_options(**{_SINGLE: True})
        _listen(self._engine)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")

    async def run(self, work: Callable[[sa.Connection], T], *, single: bool, limit_seconds: float | None = None) -> T:
        """Run `work` in the thread; with a limit, SQLite ends the statement that is running when it has passed."""
        run = partial(self._run, work, single, limit_seconds)
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.dispose)
        self._executor.shutdown()

    def _run(self, work: Callable[[sa.Connection], T], single: bool, limit_seconds: float | None) -> T:
        with self._singles.connect() if single else self._engine.begin() as connection:
            if limit_seconds is None:
                return work(connection)
            with _limited(connection, limit_seconds):
                return work(connection)


@contextmanager
def _limited(connection: sa.Connection, seconds: float) -> Iterator[None]:
    """Have SQLite interrupt what runs inside the block once `seconds` have passed."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection), "the thread's own driver"
    deadline = time.monotonic() + seconds
    driver.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS_PER_LOOK)
    try:
        yield
    finally:
        driver.set_progress_handler(None, 0)


class _DeadConnection(Unavailable):
    """A pooled connection was dead; a new connection may succeed."""


class _Attempt:
    """Translates errors of drivers inside its block into our own errors."""

    def __init__(self, database: Database, *, is_report: bool) -> None:
        self._database = database
        self._is_report = is_report
        self.has_connection = database.is_sqlite
        """Whether the next failure is one of a statement."""

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._database.succeeded()
        if error is None or isinstance(error, IntegrityError | asyncio.CancelledError):
            return
        if isinstance(error, DBAPIError | PoolTimeoutError | OSError):  # asyncpg raises OSError while connecting
            database, has_connection = self._database, self.has_connection
            raise database.failed(error, has_connection=has_connection, is_report=self._is_report) from error


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
        return _postgres_engine(url, _STATEMENT_SECONDS, pool_size=8)
    engine = create_async_engine(
        url, pool_size=3, max_overflow=0, pool_timeout=_STATEMENT_SECONDS, hide_parameters=True
    )
    _listen(engine.sync_engine)
    return engine


def _postgres_engine(url: URL, statement_seconds: float, pool_size: int) -> AsyncEngine:
    """Return an engine whose driver ends a statement after `statement_seconds`.

    Without `hide_parameters`, exceptions would quote the values of a statement.
    """
    return create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=statement_seconds,
        hide_parameters=True,
        connect_args={"timeout": _CONNECT_SECONDS, "command_timeout": statement_seconds},
    )


def _listen(engine: sa.Engine) -> None:
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_immediate)
    sa.event.listen(engine, "handle_error", _drop_if_read_only)


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


def _drop_if_read_only(context: sa.ExceptionContext) -> None:
    """Drop a connection that cannot write, and all older ones: the next ones are opened anew.

    SQLite opens a file to read alone where the disk is read-only, and stays so when the disk is well again.
    """
    code = getattr(context.original_exception, "sqlite_errorcode", 0)
    if code & _PRIMARY_CODE == sqlite3.SQLITE_READONLY:
        context.is_disconnect = True


def _begin_immediate(connection: sa.Connection) -> None:
    """Take the write lock first: a transaction that reads before it writes might not get the lock later."""
    if not connection.get_execution_options().get(_SINGLE):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
