"""Tokens are passed on at once while that is cheap, and together once it is not."""

from __future__ import annotations

import asyncio
import time

from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.wakeups import WakeupScheduler
from tests.control_plane.dispatch.test_request_stream import ANSWER, NUM_TOKENS, new_stream, output

_LONG_ROUND_SECONDS = 0.008
"""Longer than the longest round that is followed by no pause."""


async def _read(stream: RequestStream, seconds: float) -> list[list[int]]:
    """Return the tokens by batch; keep the event loop busy for `seconds` per batch."""
    batches = []
    async for batch in stream.batches():
        batches.append([token_id for delta in batch for token_id in delta.token_ids])
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
    return batches


async def _send(stream: RequestStream) -> None:
    """Give the stream a token every three turns of the event loop."""
    (choice,) = stream.state.choices
    for place in range(NUM_TOKENS):
        stream.state.receive(choice, output(place, place + 1))
        for _ in range(3):  # to the round, to the reader and back
            await asyncio.sleep(0)


async def test_a_token_is_passed_on_at_once_while_nobody_is_busy() -> None:
    stream = new_stream()
    reading = asyncio.create_task(_read(stream, 0.0))
    await asyncio.sleep(0)
    await _send(stream)
    assert await reading == [[token_id] for token_id in ANSWER]


async def test_tokens_that_come_while_a_long_round_is_rested_from_are_passed_on_together() -> None:
    stream = new_stream()
    reading = asyncio.create_task(_read(stream, _LONG_ROUND_SECONDS))
    await asyncio.sleep(0)
    await _send(stream)
    batches = await reading
    assert batches[0] == ANSWER[:1] and [token_id for batch in batches for token_id in batch] == ANSWER
    assert len(batches) == 2


async def test_one_round_wakes_all_who_wait_but_not_those_who_left() -> None:
    wakeups, loop = WakeupScheduler(), asyncio.get_running_loop()
    first, left, second = (loop.create_future() for _ in range(3))
    for waiting in (first, left, second):
        wakeups.wake(waiting)
    left.cancel()
    await asyncio.gather(first, second)
    assert left.cancelled()


async def test_streams_of_one_scheduler_go_forward_together() -> None:
    wakeups = WakeupScheduler()
    streams = [new_stream(wakeups=wakeups) for _ in range(3)]
    readings = [asyncio.create_task(_read(stream, 0.0)) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        stream.state.receive(stream.state.choices[0], output(0, NUM_TOKENS))
    assert [[token_id for batch in await reading for token_id in batch] for reading in readings] == [ANSWER] * 3
