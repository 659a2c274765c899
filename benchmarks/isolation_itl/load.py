"""Generates the load: a few endless streams, and long prompts at even intervals, open loop."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from benchmarks.isolation_itl.stats import Observed, Prompt
from benchmarks.lib.machine import CpuUse
from benchmarks.peers.protocol import prompt_ids

_POLL_SECONDS = 0.02
_START_SECONDS = 120.0


class Answers(Protocol):
    """A client of one system."""

    async def answer(self, prompt: list[int], num_tokens: int, times: list[float]) -> None:
        """Ask for exactly so many tokens, greedy; note the time of each as it comes. Cancelling leaves."""
        ...


@dataclass(frozen=True)
class Load:
    """Sizes in tokens, times in seconds."""

    vocab_size: int
    num_streams: int
    stream_prompt_tokens: int
    stream_tokens: int
    """Of one answer; a stream that has ended starts again."""
    prompt_tokens: int
    prompt_answer_tokens: int
    alone_seconds: float
    loaded_seconds: float
    wait_seconds: float
    """How long answers to prompts are waited for after the last one was sent."""
    num_warm_ups: int = 2


async def calibrate(client: Answers, load: Load, num_prompts: int) -> list[float]:
    """Return the seconds of TTFT of long prompts, one at a time, with nothing beside them."""
    source = _prompts(load.prompt_tokens, load.vocab_size, seed=7_000_000)
    found = []
    for prompt in itertools.islice(source, num_prompts):
        times: list[float] = []
        sent = time.perf_counter()
        await client.answer(prompt, 1, times)
        found.append(times[0] - sent)
    return found


async def observe(client: Answers, load: Load, interval_seconds: float, seed: int) -> Observed:
    """Run the streams by themselves, then beside the prompts; raises RuntimeError if a stream breaks off."""
    streams: list[list[float]] = []
    prompts = _prompts(load.prompt_tokens, load.vocab_size, seed * 1_000_000)
    for prompt in itertools.islice(prompts, load.num_warm_ups):
        await client.answer(prompt, load.prompt_answer_tokens, [])
    short = _prompts(load.stream_prompt_tokens, load.vocab_size, seed * 1_000_000 + 500_000)
    readers = [asyncio.create_task(_keep_reading(client, load, short, streams)) for _ in range(load.num_streams)]
    asked: list[_Asked] = []
    try:
        await _until_all_stream(streams, load.num_streams, readers)
        before = CpuUse.now()
        alone = await _window(load.alone_seconds, readers)
        start = time.perf_counter()
        asked = [_Asked(client, prompt, load) for prompt in itertools.islice(prompts, _count(load, interval_seconds))]
        for number, each in enumerate(asked):
            await asyncio.sleep(max(0.0, start + number * interval_seconds - time.perf_counter()))
            each.send()
        await asyncio.sleep(max(0.0, start + load.loaded_seconds - time.perf_counter()))
        loaded = (start, time.perf_counter())
        foreign_share = CpuUse.now().foreign_share_since(before)
        await asyncio.wait([each.task for each in asked], timeout=load.wait_seconds)
        _raise_if_broken(readers)
    finally:
        await _cancel([*readers, *(each.task for each in asked if each.is_sent)])
    return Observed(streams, [each.prompt for each in asked], alone, loaded, foreign_share)


def _count(load: Load, interval_seconds: float) -> int:
    """Return how many prompts are sent within the window, the first one at once."""
    return max(1, math.ceil(load.loaded_seconds / interval_seconds))


class _Asked:
    """One long prompt, and its answer as far as it has come."""

    task: asyncio.Task[None]

    def __init__(self, client: Answers, token_ids: list[int], load: Load) -> None:
        self._client = client
        self._token_ids = token_ids
        self._num_tokens = load.prompt_answer_tokens
        self._times: list[float] = []
        self._sent = 0.0

    @property
    def is_sent(self) -> bool:
        return self._sent > 0.0

    def send(self) -> None:
        self._sent = time.perf_counter()
        self.task = asyncio.create_task(self._client.answer(self._token_ids, self._num_tokens, self._times))

    @property
    def prompt(self) -> Prompt:
        return Prompt(self._sent, len(self._token_ids), tuple(self._times))


async def _keep_reading(client: Answers, load: Load, prompts: Iterator[list[int]], streams: list[list[float]]) -> None:
    while True:
        times: list[float] = []
        streams.append(times)
        await client.answer(next(prompts), load.stream_tokens, times)


async def _until_all_stream(streams: list[list[float]], num: int, readers: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while sum(len(times) > 4 for times in streams) < num:
            _raise_if_broken(readers)
            await asyncio.sleep(_POLL_SECONDS)


async def _window(seconds: float, readers: list[asyncio.Task[None]]) -> tuple[float, float]:
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    _raise_if_broken(readers)
    return start, time.perf_counter()


def _raise_if_broken(readers: list[asyncio.Task[None]]) -> None:
    """Raise what ended a reader; they end only by an error."""
    for reader in readers:
        if reader.done():
            raise RuntimeError("a stream broke off") from reader.exception()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _prompts(num_tokens: int, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield prompts that share no beginning."""
    return (prompt_ids(num_tokens, vocab_size, each) for each in itertools.count(seed))
