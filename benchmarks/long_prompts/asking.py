"""Asks for completions of token ids: one long prompt, and a few streams without end beside it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

_START_SECONDS = 60.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Answer:
    """A streamed answer; seconds on the clock of `time.perf_counter`."""

    sent: float
    token_times: tuple[float, ...]
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    usage: dict[str, Any]

    @property
    def ended(self) -> float:
        return self.token_times[-1]

    @property
    def content(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Tokens and their log probabilities: equal for equal keys and values of the prompt."""
        return self.tokens, self.logprobs


async def ask(http: httpx.AsyncClient, model: str, prompt: Sequence[int], num_tokens: int) -> Answer:
    """Stream a greedy answer of exactly that many tokens; raises RuntimeError for one that is not complete."""
    sent = time.perf_counter()
    times: list[float] = []
    tokens: list[str] = []
    logprobs: list[float] = []
    usage: dict[str, Any] = {}
    async for event, came in _events(http, model, prompt, num_tokens, logprobs=1):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            found = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            times += [came] * len(found["tokens"])
            tokens += found["tokens"]
            logprobs += found["token_logprobs"]
    if len(tokens) != num_tokens:
        raise RuntimeError(f"the answer has {len(tokens)} of {num_tokens} tokens")
    return Answer(sent, tuple(times), tuple(tokens), tuple(logprobs), usage)


@dataclass
class Streams:
    """When each token of each stream came."""

    token_times: list[list[float]] = field(default_factory=list)

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the gaps that ended between two times."""
        pairs = (pair for times in self.token_times for pair in pairwise(times))
        return [later - earlier for earlier, later in pairs if start <= later < end]

    def num_tokens(self, start: float, end: float) -> int:
        """Count the tokens that came between two times."""
        return sum(start <= came < end for times in self.token_times for came in times)


@asynccontextmanager
async def streams(
    http: httpx.AsyncClient, model: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> AsyncIterator[Streams]:
    """Run a stream for each prompt, all of which have begun; raises RuntimeError if one ends or breaks off."""
    running = Streams([[] for _ in prompts])
    readers = [
        asyncio.create_task(_read(http, model, prompt, max_tokens, times))
        for prompt, times in zip(prompts, running.token_times, strict=True)
    ]
    try:
        async with asyncio.timeout(_START_SECONDS):
            while min(map(len, running.token_times)) < 8:
                _raise_if_ended(readers)
                await asyncio.sleep(_POLL_SECONDS)
        yield running
        _raise_if_ended(readers)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    http: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, times: list[float]
) -> None:
    async for event, came in _events(http, model, prompt, max_tokens):
        if any(choice["text"] for choice in event["choices"]):
            times.append(came)


def _raise_if_ended(readers: Sequence[asyncio.Task[None]]) -> None:
    for reader in readers:
        if reader.done():
            raise RuntimeError("a stream ended; streams must last longer than the prompt") from reader.exception()


async def _events(
    http: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, **more: Any
) -> AsyncIterator[tuple[dict[str, Any], float]]:
    """Yield each event, and when it came."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')}")
        async for line in response.aiter_lines():
            came = time.perf_counter()
            data = line.removeprefix("data: ")
            if data not in (line, "[DONE]"):
                yield json.loads(data), came
