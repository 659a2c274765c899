"""Tests that messages and descriptors arrive whole and in order, and that anything else is refused."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tandem_engine.channel import AsyncChannel, ChannelClosed, InvalidMessage, SyncChannel, close_all, decode, encode
from tandem_engine.messages import (
    AddRequest,
    EngineStats,
    ExtentRef,
    ImportSlab,
    LayoutInfo,
    Logprob,
    MapRegion,
    ModelInfo,
    PhaseTimes,
    Ping,
    PositionLogprobs,
    Ready,
    RequestOutput,
    SealedBlocks,
    Shutdown,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

LOGPROBS = PositionLogprobs(Logprob(1, -0.5, 1), [Logprob(1, -0.5, 1), Logprob(2, -1.5, 2)])
NEVER = Logprob(1, -math.inf, 1)
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, {"steps": 1.0})
EXAMPLES: list[Any] = [
    EngineConfig("model", cpus=(0, 1), num_threads=2, kv_memory_bytes=1 << 40),
    AddRequest(
        "a",
        [1, 2, 3],
        3,
        SamplingParams(5, seed=2**64 - 1, logit_bias={3: 1.5}, stop_token_ids=(1, 2), num_logprobs=0),
        mode="prefill",
        choice_seeds=[2**64 - 1, 0],
    ),
    ImportSlab("a", 0, 2, [ExtentRef("r", 1 << 40, 10, 3, 2**64 - 1)]),
    Ping(),
    Shutdown(),
    StepDone(
        7,
        [RequestOutput("a", 0, [5], 9, [LOGPROBS], "length", True, times=PhaseTimes(1, 2, 3, 4))],
        [SealedBlocks("a", 0, [1, 2], [0, 1], True)],
        STATS,
    ),
    Ready(
        ModelInfo("m", "A", 1, "f", "cpu", 2, 3, [1], {"top_p": 0.5}, "", "", "", "", "", "", {"a": "b"}),
        LayoutInfo(1, 2, 3, 4, 4, "f", "o", 5),
        1,
        "r",
        2,
        3,
        4,
        5,
        max_held_slots=2,
        numa_node=1,
    ),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    front, engine = socket.socketpair()
    yield front, engine
    front.close()
    engine.close()


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: object) -> None:
    assert decode(encode(message)) == message


SAMPLING: dict[str, Any] = {"max_tokens": 1}
ADD: dict[str, Any] = {"type": "AddRequest", "request_id": "a", "token_ids": [1], "num_prompt_tokens": 1}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "Expected `object`, got `array`"),
        ({"type": "Nonsense"}, "Invalid value 'Nonsense' - at `$.type`"),
        ({"type": "UnmapRegion"}, "missing required field `region_id`"),
        ({"type": "UnmapRegion", "region_id": "a", "x": 1}, "contains unknown field `x`"),
        ({"type": "UnmapRegion", "region_id": 7}, "Expected `str`, got `int` - at `$.region_id`"),
        ({"type": "StartDecode", "request_id": "a", "token_ids": [1, "b"]}, "Expected `int`, got `str` - at `$.token_"),
        ({"type": "LoadProgress", "stage": "a", "fraction": True}, "Expected `float`, got `bool` - at `$.fraction`"),
        ({"type": "EngineFailed", "message": "a", "kind": "bad"}, "Invalid enum value 'bad' - at `$.kind`"),
        ({"type": "EngineConfig", "model": "m", "block_size": 0}, "block_size is 0, must be at least 1"),
        (ADD | {"sampling": SAMPLING | {"x": 1}}, "contains unknown field `x` - at `$.sampling`"),
        (ADD | {"sampling": SAMPLING | {"top_p": 2.0}}, "top_p is 2.0, must be above 0.0 to 1.0 - at `$.sampling`"),
    ],
)
def test_what_is_no_message_is_refused_by_its_path(body: object, complaint: str) -> None:
    with pytest.raises(InvalidMessage) as refusal:
        decode(msgspec.msgpack.encode(body))
    assert complaint in str(refusal.value)


def test_bytes_that_are_no_messagepack_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="a frame of 1 bytes is not a message"):
        decode(b"\xc1")


def test_a_log_probability_of_minus_infinity_passes() -> None:
    message = StepDone(1, [RequestOutput("a", 0, [5], 9, [PositionLogprobs(NEVER, [])])], [], STATS)
    assert decode(encode(message)) == message


def test_what_is_no_message_of_ours_is_not_sent() -> None:
    with pytest.raises(InvalidMessage, match="SamplingParams is not a message"):
        encode(SamplingParams(1))


async def test_messages_larger_than_the_sockets_buffer_arrive_in_order_with_their_descriptors(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    front, engine = AsyncChannel(ends[0]), SyncChannel(ends[1])
    large = [ImportSlab(str(index), 0, 0, [ExtentRef("r" * 100_000, 0, 0, 0, 0)] * 5) for index in range(4)]
    fd = os.memfd_create("marked")
    os.write(fd, b"marked")
    for message in large:
        front.send(message, (fd,))
    front.send(Shutdown())
    received: list[Any] = []
    while len(received) < 5:
        received += await asyncio.to_thread(engine.receive, wait=True)
    assert [item.message for item in received] == [*large, Shutdown()]
    assert [len(item.fds) for item in received] == [1, 1, 1, 1, 0]
    assert all(os.pread(item.fds[0], 6, 0) == b"marked" for item in received[:4])
    close_all([fd, *(item.fds[0] for item in received[:4])])


async def test_the_front_reads_what_the_engine_writes(ends: tuple[socket.socket, socket.socket]) -> None:
    front, engine = AsyncChannel(ends[0]), SyncChannel(ends[1])
    fd = os.memfd_create("marked")

    def write() -> None:
        for _ in range(200):
            engine.send(EXAMPLES[4], [fd])

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(200):
        received = await front.receive()
        assert received.message == EXAMPLES[4]
        close_all(received.fds)
    writer.join()
    os.close(fd)


def test_reading_without_waiting_returns_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    assert SyncChannel(ends[1]).receive(wait=False) == []


async def test_both_ends_notice_the_others_end(ends: tuple[socket.socket, socket.socket]) -> None:
    front = AsyncChannel(ends[0])
    waiting = asyncio.create_task(front.receive())
    ends[1].close()
    with pytest.raises(ChannelClosed):
        await waiting
    with pytest.raises(ChannelClosed):
        front.send(Shutdown())
    left, right = socket.socketpair()
    left.close()
    with pytest.raises(ChannelClosed):
        SyncChannel(right).receive(wait=True)
    with pytest.raises(ChannelClosed):
        SyncChannel(right).send(MapRegion("r", 1, 1, 1))
    right.close()
