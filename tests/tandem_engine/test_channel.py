"""Do messages and descriptors arrive whole, in order, and only if they are ours?"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tandem_engine.channel import MESSAGES, AsyncChannel, ChannelClosed, SyncChannel, close_all
from tandem_engine.codec import CodecError
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
    PositionLogprobs,
    Ready,
    RequestOutput,
    SealedBlocks,
    Shutdown,
    StepDone,
)
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

LOGPROBS = PositionLogprobs(Logprob(1, -0.5, 1), [Logprob(1, -0.5, 1), Logprob(2, -1.5, 2)])
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
    Shutdown(),
    StepDone(
        7,
        [RequestOutput("a", 0, [5], 9, [LOGPROBS], "length", True, times=PhaseTimes(1, 2, 3, 4))],
        [SealedBlocks("a", 0, [1, 2], [0, 1], True)],
        EngineStats(1, 2, 3, 4, 5, 6, 7, 8, {"steps": 1.0}),
    ),
    Ready(
        ModelInfo("m", "A", 1, "f", "cpu", 2, 3, [1], {"top_p": 0.5}, "", "", "", "", "", "", {"a": "b"}),
        LayoutInfo(1, 2, 3, 4, 4, "f", "o", 5),
        1,
        "r",
        2,
        3,
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
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\xff", "not JSON"),
        (b"[]", "a message is"),
        (b'{"Nonsense":{}}', "'Nonsense' is not a message"),
        (b'{"UnmapRegion":{}}', "UnmapRegion lacks fields: ['region_id']"),
        (b'{"UnmapRegion":{"region_id":"a","x":1}}', "UnmapRegion has unknown fields: ['x']"),
        (b'{"UnmapRegion":{"region_id":7}}', "UnmapRegion.region_id is int, must be str"),
        (b'{"StartDecode":{"request_id":"a","token_ids":[1,"b"]}}', "StartDecode.token_ids must hold only int"),
        (b'{"LoadProgress":{"stage":"a","fraction":true}}', "LoadProgress.fraction is bool, must be a number"),
        (b'{"EngineFailed":{"message":"a","kind":"bad"}}', "EngineFailed.kind is 'bad', must be one of"),
        (b'{"EngineConfig":{"model":"m","block_size":0}}', "EngineConfig: block_size is 0, must be at least 1"),
    ],
)
def test_what_is_no_message_is_refused_by_its_path(data: bytes, complaint: str) -> None:
    with pytest.raises(CodecError) as refusal:
        MESSAGES.decode(data)
    assert complaint in str(refusal.value)


def test_what_is_no_message_of_ours_is_not_sent() -> None:
    with pytest.raises(CodecError, match="SamplingParams is not a message"):
        MESSAGES.encode(SamplingParams(1))


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
