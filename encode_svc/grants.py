"""Grants of an encode worker: how much each gateway may send, by the window of tokens and calls that wait here at most.

Both ends count the same calls (`call_counts.py`), so the sum of what may come, is on its way and is here never exceeds
the window. What is here shrinks input by input, as the engine's stats tell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import count

from encode_svc.call_counts import Amount, CallCounts
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, Draining, InvalidRequest
from tandem_worker.grant_sender import demand_of
from tandem_worker.grant_timer import GrantTimer
from tandem_worker.grants import GrantDivider, Room

WINDOW_TOKENS = 16_384
"""At least: some parts of gateways, so that the next step is here while one runs."""
_WINDOW_STEPS = 2
_WINDOW_INPUTS = 2
"""Of the greatest length."""


def window_tokens(step_tokens: int, context_length: int) -> int:
    """Return how many tokens a worker takes before it has computed them."""
    return max(WINDOW_TOKENS, _WINDOW_STEPS * step_tokens, _WINDOW_INPUTS * context_length)


class GrantsStream:
    """To one gateway."""

    def __init__(self) -> None:
        self.number = 0
        """0: it has not said hello."""
        self.counts = CallCounts()
        self._events: asyncio.Queue[pb.GrantsEvent | Exception | None] = asyncio.Queue()

    def send(self, event: pb.GrantsEvent) -> None:
        self._events.put_nowait(event)

    def close(self, error: Exception | None = None) -> None:
        """End the stream after the events sent so far; with an error if there is one."""
        self._events.put_nowait(error)

    async def events(self) -> AsyncIterator[pb.GrantsEvent]:
        """Yield the events until `close`; raises its error."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


class EncodeGrants:
    """The grants of one worker; every method runs on the event loop."""

    def __init__(self, max_calls: int, here: Callable[[], Amount], clock: Callable[[], float] = time.monotonic) -> None:
        """`max_calls` that the engine takes at a time. `here` returns the calls that it has, and their tokens left."""
        self._window = Amount(max_calls, 0)
        self._here = here
        self._clock = clock
        self._numbers = count(1)
        self._open: set[GrantsStream] = set()
        self._streams: dict[int, GrantsStream] = {}
        """Those of the open ones whose gateway has said hello."""
        self._has_ended = False
        self._divider: GrantDivider[GrantsStream] = GrantDivider()
        self._timer = GrantTimer(self._divider, self._room, _send, clock)

    # ------------------------------------------------------------------------------------------------- gateways

    def opened(self, stream: GrantsStream) -> None:
        """A gateway has opened a stream. Raise Draining once the streams have ended."""
        if self._has_ended:
            raise Draining("the worker is stopping")
        self._open.add(stream)

    def attach(self, stream: GrantsStream) -> None:
        """A gateway has said hello: it hears the number of its stream, and of grants. Raise InvalidRequest."""
        if stream.number:
            raise InvalidRequest("a gateway says hello once on a stream", field="hello")
        stream.number = next(self._numbers)
        self._streams[stream.number] = stream
        stream.send(pb.GrantsEvent(stream=stream.number))
        self._divider.attach(stream)
        self._timer.look(0.0)

    def detach(self, stream: GrantsStream) -> None:
        """A stream has ended: what was granted on it is free, and what was on its way counts once it is here."""
        self._open.discard(stream)
        if self._streams.pop(stream.number, None) is not None:
            self._divider.detach(stream)
            self._timer.look(0.0)

    def commanded(self, stream: GrantsStream, command: pb.GrantsCommand) -> None:
        """A gateway says what it has sent, which calls have ended there, what waits, and which grant it has got.

        Raise InvalidRequest.
        """
        if stream.number not in self._streams:
            raise InvalidRequest("the first message of a gateway is a hello", field="hello")
        self._sent(stream, command.num_calls, command.num_tokens)
        for ended in command.ended:
            stream.counts.ended(ended.number, ended.num_tokens)
        if command.HasField("demand"):
            self._divider.seen(stream, command.demand.grant_number)
            if command.demand.HasField("waiting"):
                self._divider.demanded(stream, demand_of(command.demand.waiting), self._clock())
        self._timer.look(0.0)

    # ---------------------------------------------------------------------------------------------------- calls

    def came(self, request: pb.EncodeRequest, num_tokens: int) -> None:
        """A call has come, whatever becomes of it. Raise Cancelled if it has ended at its gateway."""
        counted = request.counted
        stream = self._streams.get(counted.stream)
        if stream is None:
            return
        self._sent(stream, counted.number, counted.sum_tokens)
        if not stream.counts.came(counted.number, num_tokens):
            raise Cancelled("the call has ended at its gateway before it came")
        self._divider.let_in(stream, request.fairness_key, num_tokens, self._clock(), request.priority)

    def changed(self) -> None:
        """Less is here than before, or the same."""
        self._timer.changed()

    def _sent(self, stream: GrantsStream, num_calls: int, num_tokens: int) -> None:
        new = stream.counts.sent(num_calls, num_tokens)
        if new.num_calls:
            self._divider.submitted(stream, new.num_tokens, self._clock(), new.num_calls)

    # ---------------------------------------------------------------------------------------------------- state

    def open(self, num_tokens: int) -> None:
        """The worker is ready, and takes so many tokens before it has computed them."""
        self._window = Amount(self._window.num_calls, num_tokens)
        self._timer.open()

    def close(self) -> None:
        """Grant nothing more: the worker drains, or ends."""
        self._timer.close()

    def end_streams(self) -> None:
        """End the streams of all gateways at once, and let none begin."""
        self.close()
        self._has_ended = True
        for stream in self._open:
            stream.close()

    def _room(self) -> Room:
        """Return what the worker can take beside what is here and on its way."""
        num_calls, num_tokens = self._here()
        for stream in self._streams.values():
            on_way = stream.counts.on_way
            num_calls, num_tokens = num_calls + on_way.num_calls, num_tokens + on_way.num_tokens
        window = self._window
        return Room(
            max(0, window.num_tokens - num_tokens),
            max(0, window.num_calls - num_calls),
            most_tokens=window.num_tokens,
            takes_any=not num_calls,
            in_order=True,
        )


def _send(stream: GrantsStream, grant: pb.Grant) -> None:
    stream.send(pb.GrantsEvent(grant=grant))
