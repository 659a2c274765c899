"""Keeps the events of a gateway: takes them in, writes them, and passes them on as they happen.

Taking in an event is some microseconds on any thread. One loop writes what waits, a few times a second, and then reads
what is new in the database, which has the events of all its gateways. So readers get every event once, in the order of
its number. While the database is away, a bounded number of events waits; the log has them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.metrics import Counter

from control_plane.events.event import Event, new_event
from control_plane.events.kinds import FROM_LOG
from control_plane.events.repetitions import Repetitions
from control_plane.events.store import MAX_TOGETHER, EventStore
from tandem_runtime import log as logs
from tandem_runtime import metrics
from tandem_runtime.errors import InvalidRequest, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_WAITING = 10_000
"""Events that wait for the database; what is beyond is lost and counted."""
_MAX_UNREAD = 1_000
"""Events that wait for one reader; a slower reader loses the oldest."""
_TURN_SECONDS = 0.25
_LOOK_SECONDS = 1.0
"""How often a gateway with readers looks for other gateways' events."""
_CLEAN_SECONDS = 600.0
_CLOSE_SECONDS = 5.0
_NOT_FIELDS = frozenset({"event", "level", "timestamp", "logger", "service", "exception", "trace_id", "span_id"})


@dataclass(eq=False)
class _Reader:
    unread: deque[Event] = field(default_factory=lambda: deque(maxlen=_MAX_UNREAD))


class EventLog:
    """Owns the events that wait, and the readers. Call `open` on the event loop before `run`."""

    def __init__(self, gateway: str, now_ms: Callable[[], int], name_of: Callable[[str], str] = str) -> None:
        """`gateway` is this gateway's incarnation, `now_ms` returns the Unix time, `name_of` the name of a worker."""
        self._gateway = gateway
        self._now_ms = now_ms
        self._name_of = name_of
        self._repetitions = Repetitions()
        self._waiting: deque[Event] = deque()
        self._num_lost = 0
        self._readers: set[_Reader] = set()
        self._news = asyncio.Event()
        self._store: EventStore | None = None
        self._last_number = 0
        self._before_flush: list[Callable[[bool], None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._counter: Counter = metrics.meter().create_counter(
            "tandem.events", unit="{event}", description="What the fleet decided, by kind."
        )

    # --------------------------------------------------------------------------------------------- taking in events

    def record(self, kind: str, /, **values: Any) -> None:
        """Take in an event of a kind of the table, on any thread. Never raises for what a caller cannot help."""
        event = new_event(kind, self._now_ms(), values, gateway=self._gateway, name_of=self._name_of)
        self._counter.add(1, {"kind": kind})
        if len(self._waiting) >= MAX_WAITING:
            self._num_lost += 1
            return
        self._waiting.append(event)

    def line_logged(self, line: Mapping[str, Any]) -> None:
        """Take in a line of the log, if its name is in the table of kinds. What comes too often is summed."""
        kind = FROM_LOG.get(str(line.get("event")))
        if kind is None:
            return
        values = {name: value for name, value in line.items() if name not in _NOT_FIELDS}
        if self._repetitions.passes(kind, values):
            self.record(kind.name, **values)

    def before_flush(self, flush: Callable[[bool], None]) -> None:
        """Call `flush` before each writing: a source that counts can then record its sums; true: all, for the last."""
        self._before_flush.append(flush)

    # ------------------------------------------------------------------------------------------------------ reading

    async def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        """Yield each new event as plain values, until the caller ends."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                while reader.unread:
                    yield reader.unread.popleft().to_json()
                await self._news.wait()
        finally:
            self._readers.discard(reader)

    # ------------------------------------------------------------------------------------------- the background loop

    @contextlib.contextmanager
    def tapping(self) -> Iterator[None]:
        """Take in the lines of this process's log inside the block."""
        with logs.listening(self.line_logged):
            yield

    async def open(self, store: EventStore) -> None:
        """Begin after the newest event of the database. Raise Unavailable."""
        self._store = store
        self._last_number = await store.last_number()

    async def run(self) -> None:
        """Write, pass on and clean, for ever."""
        clock = asyncio.get_running_loop().time
        look_at, clean_at = clock(), clock()
        while True:
            if self._waiting or clock() >= look_at:
                await self.flush()
                look_at = clock() + _LOOK_SECONDS
            if clock() >= clean_at:
                await self._clean()
                clean_at = clock() + _CLEAN_SECONDS
            await asyncio.sleep(_TURN_SECONDS)

    async def flush(self, *, is_last: bool = False) -> None:
        """Write what waits, then pass on what is new. `is_last`: sums do not wait for the end of their windows."""
        for flush in self._before_flush:
            flush(is_last)
        for kind, values in self._repetitions.ended(at_once=is_last):
            self.record(kind, **values)
        if self._store is None:
            return
        try:
            await self._write_all(self._store)
            if self._readers:
                self._pass_on(await self._store.after(self._last_number))
            else:
                self._last_number = max(self._last_number, await self._store.last_number())
        except TandemError as error:
            log.debug("events_delayed", num_waiting=len(self._waiting), error=error.message)

    async def close(self) -> None:
        """Write what waits, for some seconds at most."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.flush(is_last=True)
        except TimeoutError:
            log.warning("events_not_written", num=len(self._waiting))

    async def _write_all(self, store: EventStore) -> None:
        """Write what waits. A caller that is cancelled leaves the writing to its end: a second one would repeat it."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._writing = asyncio.create_task(self._write(store))
        await asyncio.shield(self._writing)

    async def _write(self, store: EventStore) -> None:
        while self._waiting:
            batch = [self._waiting[place] for place in range(min(len(self._waiting), MAX_TOGETHER))]
            try:
                await store.write(batch)
            except InvalidRequest:  # the database cannot hold one of them, and would refuse the batch for ever
                self._num_lost += len(batch)
            for _ in batch:
                self._waiting.popleft()
        if self._num_lost:
            num, self._num_lost = self._num_lost, 0
            log.error("events_lost", num=num)

    async def _clean(self) -> None:
        if self._store is None:
            return
        try:
            await self._store.clean()
        except TandemError as error:
            log.warning("events_not_cleaned", error=error.message)

    def _pass_on(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._last_number = events[-1].id
        for reader in self._readers:
            reader.unread.extend(events)
        news, self._news = self._news, asyncio.Event()  # every reader looks once, and then waits for the next setting
        news.set()
