"""Takes one long prompt through every way that its KV can come from, beside four streams.

    together    one aggregated worker computes the prompt: its answer is what all ways must give
    cold        prefill computes the prompt, decode reads its pool
    pool        prefill finds the prompt in its own pool
    host        the same, and decode is on another host, whose KV service has a small arena
    store       a new prefill worker loads the prompt from the KV service's memory
    disk        other prompts have driven it out of pool and memory: prefill loads it from the KV service's disk

Each way has a decode worker of its own: its pool is empty, and its longest times are of this way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.command import Progress
from benchmarks.lib.random_model import LONG
from benchmarks.long_prompts.asking import Answer, Streams, ask, streams
from benchmarks.long_prompts.services import Service, Services, Stall
from benchmarks.peers.protocol import prompt_ids

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 1 << 10
WAYS = ("cold", "pool", "host", "store", "disk")
_NUM_STREAMS = 4
_STREAM_TOKENS = 100_000
_SPARE_TOKENS = 16_384
_FILLER_TOKENS = 4096
_DISK_BYTES = 4 << 30
_WARM_UP_TOKENS = 80

Counters = Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """A full run and a quick one differ in nothing else."""

    num_tokens: int
    arena_bytes: int
    num_tail_tokens: int
    """Of the prompt that shares the rest with the long one, and is computed beside the streams."""
    num_answer_tokens: int = 16
    alone_seconds: float = 3.0

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * BYTES_PER_TOKEN

    @property
    def num_blocks(self) -> int:
        """Those that can be cached: the block of the last token is always computed."""
        return (self.num_tokens - 1) // BLOCK_TOKENS

    @property
    def store_bytes(self) -> int:
        return self.kv_bytes + max(self.kv_bytes // 4, 8 << 20)


@dataclass(frozen=True)
class Walked:
    """One way: what the clients saw, and what the services counted meanwhile."""

    answer: Answer
    gaps: list[float]
    """Of the streams, from the prompt's arrival to its answer's end; seconds."""
    alone: list[float]
    """Of the streams before."""
    decode: Counters
    """Longest times of the decode worker, and its counts of this way."""
    prefill: Counters
    """The same of the prefill worker; empty for an aggregated one."""
    kv: Mapping[str, Counters] = field(default_factory=dict)
    """Counts of each KV service."""
    stalls: Mapping[str, Stall] = field(default_factory=dict)
    """Longest stall of each service's event loop."""


class Walker:
    """Starts the workers that each way needs, and asks."""

    def __init__(self, services: Services, model: Path, plan: Plan, cpus: tuple[int, int], progress: Progress) -> None:
        self._services = services
        self._plan = plan
        self._progress = progress
        self._cpus = cpus
        self._prompt = prompt_ids(plan.num_tokens, LONG["vocab_size"], 1)
        self._model = ["--model", str(model), "--block-size", str(BLOCK_TOKENS), "--speculation", "off"]
        self._kv: list[Service] = []
        self._prefill: Service | None = None

    async def together(self) -> tuple[Answer, Walked]:
        """Return the answer of an aggregated worker, alone; and the end of another prompt beside streams."""
        both = ",".join(map(str, self._cpus))
        decode = await self._start_decode("together", cpus=both)
        self._progress("together: one aggregated worker computes the prompt")
        answer = await self._ask(self._prompt, self._plan.num_answer_tokens)
        num_tail = self._plan.num_tail_tokens
        other = self._prompt[:-num_tail] + prompt_ids(num_tail, LONG["vocab_size"], 2)
        async with self._streams() as running:
            tail = await self._walk(decode, other, running)
        await self._services.stop(decode)
        return answer, tail

    async def ways(self) -> AsyncIterator[tuple[str, Walked]]:
        """Yield each way once it is done."""
        plan = self._plan
        store = ["--store-bytes", str(plan.store_bytes), "--disk-bytes", str(_DISK_BYTES)]
        self._kv = [await self._services.start("kv", "kv-a", "--host-id", "host-a", *store)]
        self._prefill = await self._start_prefill("prefill-1")
        yield "cold", await self._way("cold")
        yield "pool", await self._way("pool")
        arena = ["--arena-bytes", str(plan.arena_bytes), "--store-bytes", "0"]
        self._kv.append(await self._services.start("kv", "kv-b", "--host-id", "host-b", *arena))
        yield "host", await self._way("host", host="host-b")
        await self._services.stop(self._kv.pop())
        await self._stored()
        await self._services.stop(self._prefill)
        self._prefill = await self._start_prefill("prefill-2")
        yield "store", await self._way("store")
        yield "disk", await self._way("disk", fill=True)

    async def _way(self, name: str, host: str = "host-a", *, fill: bool = False) -> Walked:
        decode = await self._start_decode(name, cpus=str(self._cpus[1]), host=host)
        await self._handed_over(decode)
        if fill:
            await self._fill()
        async with self._streams() as running:
            self._progress(f"{name}: asking")
            walked = await self._walk(decode, self._prompt, running)
        await self._services.stop(decode)
        return walked

    async def _walk(self, decode: Service, prompt: list[int], running: Streams) -> Walked:
        """Ask beside the streams, and compare what the services report before and after."""
        counted = [decode, *([self._prefill] if self._prefill else []), *self._kv]
        began = time.perf_counter()
        await asyncio.sleep(self._plan.alone_seconds)
        before = {service.name: await self._counters(service) for service in counted}
        for service in self._services.running:
            service.forget_stalls()
        answer = await self._ask(prompt, self._plan.num_answer_tokens)
        after = {service.name: await self._counters(service) for service in counted}
        change = {name: _change(before[name], after[name]) for name in after}
        return Walked(
            answer,
            gaps=running.gaps(answer.sent, answer.ended),
            alone=running.gaps(began, answer.sent),
            decode=change[decode.name],
            prefill=change[self._prefill.name] if self._prefill else {},
            kv={service.name: change[service.name] for service in self._kv},
            stalls={service.name: service.longest_stall() for service in self._services.running},
        )

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[Streams]:
        prompts = [prompt_ids(32, LONG["vocab_size"], 100 + number) for number in range(_NUM_STREAMS)]
        async with streams(self._services.http, await self._services.model(), prompts, _STREAM_TOKENS) as running:
            yield running

    async def _start_decode(self, name: str, *, cpus: str, host: str = "host-a") -> Service:
        num_tokens = self._plan.num_tokens + _NUM_STREAMS * _STREAM_TOKENS + _SPARE_TOKENS
        flags = [*self._model, "--kv-memory-bytes", str(num_tokens * BYTES_PER_TOKEN)]
        return await self._services.start("decode", f"decode-{name}", *flags, "--host-id", host, "--cpus", cpus)

    async def _start_prefill(self, name: str) -> Service:
        pool = ["--kv-memory-bytes", str((self._plan.num_tokens + _SPARE_TOKENS) * BYTES_PER_TOKEN)]
        place = ["--host-id", "host-a", "--cpus", str(self._cpus[0])]
        return await self._services.start("prefill", name, *self._model, *pool, *place)

    async def _handed_over(self, decode: Service) -> None:
        """Ask until decode has read a prompt's KV from prefill: the services have found each other then."""
        seed = 1000
        while not (await self._counters(decode)).get("blocks_imported"):
            seed += 1
            await self._ask(prompt_ids(_WARM_UP_TOKENS, LONG["vocab_size"], seed), 2)

    async def _fill(self) -> None:
        """Compute other prompts until the long one is out of prefill's pool and the store's memory."""
        num_prompts = -(-(self._plan.store_bytes // BYTES_PER_TOKEN + _SPARE_TOKENS) // _FILLER_TOKENS)
        self._progress(f"disk: {num_prompts} other prompts of {_FILLER_TOKENS} tokens")
        for number in range(num_prompts):
            await self._ask(prompt_ids(_FILLER_TOKENS, LONG["vocab_size"], 2000 + number), 1)

    async def _stored(self) -> None:
        """Wait until the store has the whole prompt."""

        def has_all(row: dict[str, Any]) -> bool:
            return int(row["kv_service"]["store"]["num_blocks"]) >= self._plan.num_blocks

        await self._services.until("kv-a", has_all, "the store has the prompt")

    async def _ask(self, prompt: list[int], num_tokens: int) -> Answer:
        return await ask(self._services.http, await self._services.model(), prompt, num_tokens)

    async def _counters(self, service: Service) -> Counters:
        counters: Counters = (await self._services.row(service.name))["load"]["counters"]
        return counters


def _change(before: Counters, after: Counters) -> Counters:
    """Return what was counted in between; of longest times the last, which are since the worker's start."""
    return {
        name: value if name.startswith("longest_") else value - before.get(name, 0.0) for name, value in after.items()
    }
