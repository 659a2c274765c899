"""Measures all arrangements of one model by turns, with the same requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.lib.arrangements import Arrangement, Workload
from benchmarks.lib.machine import CpuUse
from benchmarks.lib.memory_need import KV_BYTES_PER_WORKER, check_memory
from benchmarks.lib.prompts import prompts
from benchmarks.lib.served import Served
from benchmarks.lib.stats import Answer, Figures, Trace, count_figures, latency_figures, ratio_figures, share_figures
from benchmarks.lib.streaming import ask, new_client
from benchmarks.lib.traces import traces_of
from tests.otlp_sink import OtlpSink


@dataclass(frozen=True)
class Sample:
    """What came back from one arrangement: an answer and a trace per request, in the same order."""

    answers: Sequence[Answer]
    traces: Sequence[Trace]


@dataclass(frozen=True)
class Measured:
    """The figures of one workload, by arrangement, and what they were made of."""

    workload: Workload
    by_arrangement: dict[str, Figures]
    ratios: Figures
    foreign_cpu_share: float
    samples: Mapping[str, Sample] = field(default_factory=dict)


@dataclass
class _Side:
    """One arrangement that is up, and what it has answered so far."""

    name: str
    hands_over: bool
    model: str
    client: httpx.AsyncClient
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    async def serve(self, batch: Sequence[str], workload: Workload) -> None:
        """Send a batch with so many at a time, and keep the answers."""
        started = time.perf_counter()
        self.answers += await self._answers(batch, workload)
        self.seconds += time.perf_counter() - started

    async def warm_up(self, some: Sequence[str], workload: Workload) -> None:
        await self._answers(some, workload)

    async def _answers(self, batch: Sequence[str], workload: Workload) -> list[Answer]:
        waiting = iter(batch)

        async def keep_asking() -> list[Answer]:
            return [await ask(self.client, self.model, prompt, workload.num_output_tokens) for prompt in waiting]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_asking()) for _ in range(workload.concurrency)]
        return [answer for task in tasks for answer in task.result()]


async def measure_model(
    model: Path,
    flags: tuple[str, ...],
    arrangements: Sequence[Arrangement],
    workloads: Sequence[Workload],
    folder: Path,
    progress: Callable[[str], None],
) -> AsyncGenerator[Measured, None]:
    """Bring up every arrangement of a model at once; yield each workload once all have had it in turn."""
    check_memory(model, sum(arrangement.num_workers for arrangement in arrangements))
    async with AsyncExitStack() as stack:
        sink = await stack.enter_async_context(OtlpSink())
        sides = []
        for arrangement in arrangements:
            progress(f"starting {arrangement.name}")
            sides.append(await _bring_up(stack, arrangement, flags, folder, sink.endpoint))
        for workload in workloads:
            yield await _measure(model, sides, workload, sink, progress)


async def _bring_up(
    stack: AsyncExitStack, arrangement: Arrangement, flags: tuple[str, ...], folder: Path, endpoint: str
) -> _Side:
    environment = {
        **arrangement.environment,
        "TANDEM_PREFILL_KV_MEMORY_BYTES": str(KV_BYTES_PER_WORKER),
        "TANDEM_DECODE_KV_MEMORY_BYTES": str(KV_BYTES_PER_WORKER),
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        # The idle side must not probe itself while another one is measured.
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": "86400",
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": "172800",
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        "TANDEM_DECODE_SPECULATION": "off",  # random weights repeat themselves, which no model does
    }
    served = Served(folder / arrangement.name, (*flags, *arrangement.flags), environment, arrangement.roles)
    await stack.enter_async_context(served)
    client = await stack.enter_async_context(new_client(served.base_url))
    return _Side(arrangement.name, arrangement.hands_over, served.model, client)


async def _measure(
    model: Path, sides: Sequence[_Side], workload: Workload, sink: OtlpSink, progress: Callable[[str], None]
) -> Measured:
    progress(f"{workload.num_rounds} rounds of {workload.round_size}, {workload.concurrency} at a time")
    source = prompts(model, workload.num_prompt_tokens, seed=workload.seed)
    for side in sides:
        side.answers, side.seconds = [], 0.0
        await side.warm_up(list(itertools.islice(source, max(workload.num_warm_ups, workload.concurrency))), workload)
    before = CpuUse.now()
    for turn, batch in enumerate(_batches(source, workload)):
        for side in [*sides[turn % len(sides) :], *sides[: turn % len(sides)]]:
            await side.serve(batch, workload)
    foreign = CpuUse.now().foreign_share_since(before)
    samples = {
        side.name: Sample(side.answers, await traces_of(sink, side.answers, handed_over=side.hands_over))
        for side in sides
    }
    figures = {side.name: _figures(samples[side.name], side.seconds) for side in sides}
    return Measured(workload, figures, ratio_figures(figures), foreign, samples)


def _batches(source: Iterator[str], workload: Workload) -> Iterator[list[str]]:
    for _ in range(workload.num_rounds):
        yield list(itertools.islice(source, workload.round_size))


def _figures(sample: Sample, seconds: float) -> Figures:
    return {
        **latency_figures(sample.answers),
        **share_figures(sample.traces),
        **count_figures(sample.answers, seconds),
    }
