"""A gateway reads whole messages, however they arrive and whoever stops waiting for them."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from control_plane.text_processes.wire import AsyncChannel, Ended, Failed, Hello, Message, _framed

LONG = Failed("", "x" * 3_000_000)


@contextmanager
def connected() -> Iterator[tuple[AsyncChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    channel = AsyncChannel(ours)
    try:
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


def has_input(channel: AsyncChannel) -> bool:
    """Whether bytes wait that nobody has read."""
    readable, _, _ = select.select([channel._connection], [], [], 0)
    return bool(readable)


async def send(theirs: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(theirs, data)


async def test_messages_of_all_sizes_arrive_whole_and_in_order() -> None:
    with connected() as (channel, theirs):
        sent: list[Message] = [Hello(1), LONG, Hello(2), Hello(3), LONG]
        sending = asyncio.create_task(send(theirs, b"".join([_framed(each) for each in sent])))
        async with asyncio.timeout(10):
            assert [await channel.receive() for _ in sent] == sent
            await sending


async def test_other_tasks_run_while_a_long_message_is_read() -> None:
    with connected() as (channel, theirs):
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        tasks = [asyncio.create_task(send(theirs, _framed(LONG))), asyncio.create_task(count())]
        async with asyncio.timeout(10):
            assert await channel.receive() == LONG
        assert num_turns >= len(LONG.message) >> 18  # a socket's buffer has less than 256 KiB
        for task in tasks:
            task.cancel()


async def test_whoever_stops_waiting_leaves_the_message_to_the_next_reader() -> None:
    with connected() as (channel, theirs):
        framed = _framed(LONG)
        for part in (framed[:5], framed[5:100_000], framed[100_000:200_000]):
            await send(theirs, part)
            reading = asyncio.create_task(channel.receive())
            while has_input(channel):  # noqa: ASYNC110 - the channel tells nobody
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        sending = asyncio.create_task(send(theirs, framed[200_000:]))
        async with asyncio.timeout(10):
            assert await channel.receive() == LONG
            await sending


async def test_the_end_in_the_midst_of_a_message_is_the_end() -> None:
    with connected() as (channel, theirs):
        await send(theirs, _framed(LONG)[:100_000])
        theirs.close()
        with pytest.raises(Ended):
            await asyncio.wait_for(channel.receive(), 10)


async def test_a_socket_with_the_number_of_a_closed_one_is_read() -> None:
    for number in range(5):
        with connected() as (channel, theirs):
            await send(theirs, _framed(Hello(number)))
            assert await asyncio.wait_for(channel.receive(), 10) == Hello(number)


async def test_a_channel_that_is_closed_here_ends_for_its_reader() -> None:
    with connected() as (channel, _):
        reading = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(Ended):
            await asyncio.wait_for(reading, 10)


async def test_messages_that_nobody_takes_are_left_in_the_socket() -> None:
    with connected() as (channel, theirs):
        await send(theirs, _framed(Hello(1)))
        while has_input(channel):  # noqa: ASYNC110 - the channel tells nobody
            await asyncio.sleep(0)
        await send(theirs, _framed(Hello(2)))
        await asyncio.sleep(0)
        assert has_input(channel)
        assert [await asyncio.wait_for(channel.receive(), 10) for _ in range(2)] == [Hello(1), Hello(2)]
