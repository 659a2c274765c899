"""Injects network faults into a process's RPCs: delays some, and sends some unary ones twice.

The faults are injected between tandem_runtime.channel and gRPC, invisible to the code under test:

    delayed          the request leaves late; a stream opens late, and some of its messages come late
    doubled          the server gets a second copy at the same time; the first answer counts
    answer lost      the server's answer is dropped, and the same request is sent again
    late copy        a second copy arrives long after the end of the call
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc

import tandem_runtime.channel
import tandem_runtime.enrolment.client
from tandem_runtime.calls import TracedChannel
from tandem_runtime.errors import TandemError

_LONGEST_DELAY_SECONDS = 0.3
_LONGEST_LATE_COPY_SECONDS = 3.0
_STREAM_MESSAGES_DELAYED = 0.01
_UNARY = {"": 0.70, "delayed": 0.12, "doubled": 0.07, "answer lost": 0.06, "late copy": 0.05}
_LETTERS = {"delayed": b"d", "doubled": b"2", "answer lost": b"l", "late copy": b"c", "stream delayed": b"s"}

Call = Callable[[], Coroutine[Any, Any, Any]]


class Injector:
    """Generates the faults of one process from its seed, and counts them in a file that survives kill -9."""

    def __init__(self, seed: str, counts: Path) -> None:
        self._rng = random.Random(seed)
        self._file = os.open(counts, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._late: set[asyncio.Task[None]] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make every channel that is opened inside the block faulty, those for certificates too."""
        with (
            patch.object(tandem_runtime.channel, "TracedChannel", self._channel),
            patch.object(tandem_runtime.enrolment.client, "TracedChannel", self._channel),
        ):
            yield

    def fault_of_a_call(self) -> str:
        return self._counted(self._rng.choices(list(_UNARY), list(_UNARY.values()))[0])

    def delay_of_a_message(self) -> float:
        """Return the delay of a stream's message in seconds; mostly 0."""
        if self._rng.random() >= _STREAM_MESSAGES_DELAYED:
            return 0.0
        self._counted("stream delayed")
        return self.delay()

    def delay(self) -> float:
        return self._rng.random() ** 3 * _LONGEST_DELAY_SECONDS  # mostly short

    def send_a_copy(self, call: Call, *, is_late: bool) -> None:
        seconds = self._rng.random() * _LONGEST_LATE_COPY_SECONDS if is_late else 0.0
        task = asyncio.create_task(self._copy(seconds, call))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _copy(self, seconds: float, call: Call) -> None:
        await asyncio.sleep(seconds)
        try:
            await call()
        except (TandemError, asyncio.CancelledError):
            return  # the caller has left: nobody awaits the copy's answer

    def _channel(self, channel: grpc.aio.Channel, translate: Any) -> TracedChannel:
        return FaultyChannel(channel, translate, self)

    def _counted(self, fault: str) -> str:
        if fault:
            os.write(self._file, _LETTERS[fault])
        return fault


def counted(file: Path) -> Counter[str]:
    """Return the number of faults of each kind in the file of counts."""
    letters = Counter(file.read_bytes()) if file.exists() else Counter[int]()
    return Counter({fault: letters[letter[0]] for fault, letter in _LETTERS.items()})


class FaultyChannel(TracedChannel):
    """A channel over a network that delays and duplicates."""

    def __init__(self, channel: grpc.aio.Channel, translate: Any, injector: Injector) -> None:
        super().__init__(channel, translate)
        self._injector = injector

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        call = super().unary_unary(*args, **kwargs)
        return lambda request, *, timeout=None, **rest: _FaultyUnary(self._injector, call, request, timeout, rest)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        call = super().unary_stream(*args, **kwargs)
        return lambda *args, **kwargs: _LateStream(call(*args, **kwargs), self._injector)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        call = super().stream_stream(*args, **kwargs)
        return lambda *args, **kwargs: _LateStream(call(*args, **kwargs), self._injector)


class _FaultyUnary:
    """A unary call, to be awaited once."""

    def __init__(
        self, injector: Injector, call: Callable[..., Any], request: Any, timeout: float | None, rest: dict[str, Any]
    ) -> None:
        self._injector = injector
        self._call = call
        self._request = request
        self._timeout = timeout
        self._rest = rest

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer(self._injector.fault_of_a_call()).__await__()

    async def _answer(self, fault: str) -> Any:
        if fault == "delayed":
            await asyncio.sleep(self._injector.delay())
        elif fault == "doubled":
            self._injector.send_a_copy(self._send, is_late=False)
        elif fault == "answer lost":
            await self._send()
        elif fault == "late copy":
            self._injector.send_a_copy(self._send, is_late=True)
        return await self._send()

    async def _send(self) -> Any:
        try:
            return await self._call(self._request, timeout=self._timeout, **self._rest)
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile: gRPC cancels running calls
            raise asyncio.CancelledError from error


class _LateStream:
    """A streaming call some of whose messages are delayed; everything else is the call's own."""

    def __init__(self, call: Any, injector: Injector) -> None:
        self._call = call
        self._injector = injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> _LateStream:
        return self

    async def __anext__(self) -> Any:
        message = await self._call.__anext__()
        await self._be_late()
        return message

    async def read(self) -> Any:
        message = await self._call.read()
        await self._be_late()
        return message

    async def _be_late(self) -> None:
        if seconds := self._injector.delay_of_a_message():
            await asyncio.sleep(seconds)
