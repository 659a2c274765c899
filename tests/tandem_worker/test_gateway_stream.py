"""A worker leaves few events on their way to a gateway that counts them, and sends those that have waited together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tandem_worker.requests import GatewayStream

MOST_UNREAD = 16


def counted() -> GatewayStream:
    stream = GatewayStream("g")
    stream.counts_events = True
    return stream


def accepted(number: int, num_bytes: int = 0) -> pb.Event:
    return pb.Event(accepted=pb.Accepted(request_id=f"{number}" + num_bytes * "x"))


def tokens(stream: GatewayStream, step: int, *token_ids: int) -> None:
    stream.add(pb.TokenOutput(request_id="r", position=step, token_ids=token_ids))
    stream.flush(step)


async def filled(stream: GatewayStream) -> AsyncIterator[pb.Event]:
    """Return the events of a stream on which as many are unread as may be."""
    events = stream.events()
    for number in range(MOST_UNREAD):
        stream.send(accepted(number))
        assert await anext(events) == accepted(number)
    return events


async def one_turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_for_a_gateway_that_has_enough_unread_comes_in_one_message_and_in_order() -> None:
    stream = counted()
    events = await filled(stream)
    following = asyncio.ensure_future(anext(events))
    tokens(stream, 0, 7)
    tokens(stream, 1, 8)
    stream.send(accepted(100))
    tokens(stream, 2, 9)
    await one_turn()
    assert not following.done()
    stream.was_read(1)
    several = (await following).several.events
    assert [each.WhichOneof("kind") for each in several] == ["step", "accepted", "step"]
    assert [list(output.token_ids) for each in several for output in each.step.outputs] == [[7, 8], [9]]
    tokens(stream, 3, 10)
    waiting = asyncio.ensure_future(anext(events))
    await one_turn()
    assert not waiting.done(), "the several were one message, and sixteen are unread again"
    stream.was_read(2)
    assert list((await waiting).step.outputs[0].token_ids) == [10]


async def test_events_that_a_gateway_reads_leave_one_by_one() -> None:
    stream = counted()
    events = stream.events()
    for number in range(100):
        stream.send(accepted(number))
        assert await anext(events) == accepted(number)
        stream.was_read(number + 1)


async def test_a_gateway_of_the_release_before_gets_all_one_by_one() -> None:
    stream = GatewayStream("g")
    for number in range(100):
        stream.send(accepted(number))
    events = stream.events()
    assert [await anext(events) for _ in range(100)] == [accepted(number) for number in range(100)]


async def test_a_message_holds_some_events_and_bytes_at_most() -> None:
    stream = counted()
    for number in range(150):
        stream.send(accepted(number))
    for number in range(3):
        stream.send(accepted(number, 200_000))
    events = stream.events()
    several = [await anext(events) for _ in range(5)]
    assert [len(each.several.events) for each in several[:3]] == [64, 64, 23], "with the first of the large ones"
    assert [len(each.accepted.request_id) for each in several[3:]] == [200_001, 200_001]


async def test_a_message_holds_some_outputs_at_most() -> None:
    stream = counted()
    for number in range(3):
        for request in range(300):
            stream.add(pb.TokenOutput(request_id=f"{number}-{request}", token_ids=[1]))
        stream.flush(number)
        stream.send(accepted(number))
    events = stream.events()
    assert [len((await anext(events)).several.events) for _ in range(3)] == [2, 2, 2]


async def test_tables_come_by_themselves_and_in_their_place() -> None:
    stream = counted()
    for number in range(2):
        stream.send(accepted(number))
    stream.send_tables([pb.TablesPart(number=1), pb.TablesPart(number=2, is_last=True)])
    stream.send(accepted(2))
    events = stream.events()
    kinds = [(await anext(events)).WhichOneof("kind") for _ in range(4)]
    assert kinds == ["several", "tables", "accepted", "tables"]


@pytest.mark.parametrize("error", [None, Unavailable("the worker leaves")])
async def test_a_stream_that_ends_waits_for_no_reader(error: Unavailable | None) -> None:
    stream = counted()
    events = await filled(stream)
    following = asyncio.ensure_future(anext(events))
    stream.send(accepted(100))
    stream.close(error)
    assert await following == accepted(100)
    with pytest.raises(StopAsyncIteration if error is None else Unavailable):
        await anext(events)


async def test_a_gateway_that_miscounts_harms_only_its_own_stream() -> None:
    stream = counted()
    events = await filled(stream)
    stream.was_read(5)
    stream.was_read(3)
    for number in range(5):
        stream.send(accepted(number))
        assert await anext(events) == accepted(number)
    stream.was_read(1 << 63)
    for number in range(100):
        stream.send(accepted(number))
        assert await anext(events) == accepted(number)
