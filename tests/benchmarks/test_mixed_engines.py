"""Tests what benchmarks.mixed_engines counts, and which processes it pins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.lib.command import Outcome
from benchmarks.mixed_engines.__main__ import QUICK, Count, _enter, _stream
from benchmarks.mixed_engines.pinning import pin_engines


def test_the_ratio_is_that_of_the_totals_turn_by_turn() -> None:
    outcome = Outcome()
    size = replace(QUICK, counted_seconds=2.0)
    direct = [Counter(ours=300, vllm=100), Counter(ours=310, vllm=90)]
    routed = [Counter(ours=200, vllm=160), Counter(ours=190, vllm=170)]
    _enter(outcome, {"direct": direct, "routed": routed}, size)
    assert outcome.figures["direct.total"] == 200 and outcome.figures["routed.total"] == 180
    assert outcome.figures["routed.vllm"] == 82.5
    assert outcome.figures["ratio"] == 0.9
    assert [target.is_met for target in outcome.targets] == [False]


@dataclass
class Dispatcher:
    """Answers each request with three tokens of one worker; the last answer opens the count, and is the last."""

    count: Count
    num_left: int
    num_closed: int = 0

    async def submit(self, _: Any) -> Any:
        self.num_left -= 1
        if not self.num_left:
            self.count.is_open = True
        elif self.num_left < 0:
            raise asyncio.CancelledError
        return _Stream(self)


class _Stream:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.state = SimpleNamespace(choices=[SimpleNamespace(call=SimpleNamespace(worker_id="ours"))])

    async def __aiter__(self) -> AsyncIterator[Any]:
        for token in range(3):
            yield SimpleNamespace(token_ids=[token])

    async def aclose(self) -> None:
        self._dispatcher.num_closed += 1


async def test_tokens_count_while_the_middle_part_of_a_turn_lasts_and_streams_are_closed() -> None:
    count = Count()
    dispatcher: Any = Dispatcher(count, num_left=4)
    prompts: Iterator[list[int]] = repeat([5, 6])
    with pytest.raises(asyncio.CancelledError):
        await _stream(dispatcher, "m", prompts, count)
    assert count.tokens == {"ours": 3}
    assert dispatcher.num_closed == 4


def test_only_the_engine_below_a_worker_is_pinned() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', *sys.argv[1:]])"
    for engine in ("tandem_engine.process", "tandem_vllm"):
        worker = subprocess.Popen([sys.executable, "-c", code, engine], stdin=subprocess.PIPE)
        try:
            process = psutil.Process(worker.pid)
            while not process.children():
                assert worker.poll() is None, "the worker ended"
            before = process.cpu_affinity()
            while engine not in process.children()[0].cmdline():  # until it has run its program
                assert worker.poll() is None, "the worker ended"
            pin_engines([worker.pid])
            assert process.children()[0].cpu_affinity() == [before[0]]
            assert process.cpu_affinity() == before
        finally:
            worker.communicate(b"\n")


def test_a_worker_without_an_engine_is_refused() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(RuntimeError, match=rf"worker {worker.pid} has engine processes \[\], one is needed"):
            pin_engines([worker.pid])
    finally:
        worker.communicate(b"\n")
