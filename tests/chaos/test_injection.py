"""Tests of the faulty network: calls that know nothing of it are delayed and duplicated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded
from tests.chaos.injection import Injector, counted
from tests.system.fleet import until
from tests.tandem_runtime.test_calls import Decode, decode_stub


class Calls:
    """A server with a unary method that counts calls, and a stream of two chunks."""

    def __init__(self) -> None:
        self.number = 0

    async def stats(self, context: Any) -> pb.StatsReply:
        self.number += 1
        return pb.StatsReply(load=pb.LoadReport(num_running=self.number))

    async def asset(self, *_: Any) -> AsyncIterator[pb.Chunk]:
        for offset in range(2):
            yield pb.Chunk(offset=offset)


@pytest.mark.parametrize(
    ("fault", "num_calls", "answer"),
    [("delayed", 1, 1), ("doubled", 2, None), ("answer lost", 2, 2), ("late copy", 2, 1)],
)
async def test_each_fault_of_a_unary_call(tmp_path: Path, fault: str, num_calls: int, answer: int | None) -> None:
    """The caller gets one answer of a duplicated call."""
    calls, injector = Calls(), Injector("1", tmp_path / "counts")
    with injector.installed(), patch.object(injector, "fault_of_a_call", lambda: fault):
        async with decode_stub(Decode(stats=calls.stats)) as stub:
            reply = await stub.Stats(pb.StatsRequest())
            assert answer in (None, reply.load.num_running)
            await until(lambda: calls.number == num_calls, 5)


async def test_errors_come_through_as_they_are_and_faults_are_counted(tmp_path: Path) -> None:
    async def full(context: Any) -> pb.StatsReply:
        raise Overloaded("full")

    injector = Injector("1", tmp_path / "counts")
    with injector.installed():
        async with decode_stub(Decode(stats=full)) as stub:
            calls = (stub.Stats(pb.StatsRequest(), timeout=10) for _ in range(60))
            answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, Overloaded) for answer in answers)
    assert all(counted(tmp_path / "counts")[fault] for fault in ("delayed", "doubled", "answer lost", "late copy"))


async def test_messages_of_a_stream_come_late_and_in_order(tmp_path: Path) -> None:
    injector = Injector("1", tmp_path / "counts")
    with injector.installed(), patch.object(injector, "delay_of_a_message", lambda: 0.01):
        async with decode_stub(Decode(asset=Calls().asset)) as stub:
            offsets = [chunk.offset async for chunk in stub.GetAsset(pb.AssetRequest())]
    assert offsets == [0, 1]
