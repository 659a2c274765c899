"""Measures whether routing gives a mixed fleet the throughput of its engines: our own, and vLLM.

    TANDEM_VLLM_PYTHON=build/vllm/bin/python python -m benchmarks.mixed_engines [--quick] [--json FILE]

One decode worker has our engine, one has vLLM; both serve one model name, each engine with a core of its own. Turns
alternate, over the same workers:

    direct   each worker has half of the streams for itself, both at the same time, with no routing
    routed   the router of the gateway gives all streams to the workers

A stream asks for the next answer when it has the last one. What is counted are the tokens of a turn's middle part.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from benchmarks.mixed_engines.pinning import pin_engines
from control_plane.dispatch.dispatcher import Dispatcher
from tests.system.fleet import Fleet, token_request

MIN_RATIO = 0.95
_NUM_PROMPT_TOKENS, _NUM_TOKENS = 32, 64
_OURS, _VLLM = "ours", "vllm"
_START_SECONDS = 240.0
_EXACTNESSES = ("class", "layout")
_SMALL = (
    *("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1024", "--max-num-seqs", "64"),
    *("--kv-memory-bytes", str(256 << 20), "--speculation", "off"),
)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    shape: str
    num_streams: int
    num_turns: int
    ramp_seconds: float
    counted_seconds: float


FULL, QUICK = Size("0.1b", 16, 5, 4.0, 12.0), Size("0.1b", 8, 2, 2.0, 4.0)


@dataclass
class Count:
    """Tokens of one turn, by worker."""

    is_open: bool = False
    tokens: Counter[str] = field(default_factory=Counter)

    def add(self, worker_id: str, num_tokens: int) -> None:
        if self.is_open:
            self.tokens[worker_id] += num_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    parsing = parser("mixed_engines", __doc__ or "", "two short turns")
    parsing.add_argument("--exactness", choices=_EXACTNESSES, default="class", help="which workers share KV blocks")
    options = parsing.parse_args(arguments)
    python = os.environ.get("TANDEM_VLLM_PYTHON", "")
    if not python:
        raise SystemExit("TANDEM_VLLM_PYTHON must name the interpreter of an environment with vLLM")
    size = QUICK if options.quick else FULL

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        async with _fleet(made(folder, size.shape), folder, python, options.exactness, progress) as fleet:
            await _measure(outcome, fleet, size, progress)

    conditions = {
        "model": f"random Llama, shape {size.shape}, float32",
        "exactness": options.exactness,
        "streams": f"{size.num_streams}, {_NUM_PROMPT_TOKENS} + {_NUM_TOKENS} tokens each, one answer after another",
        "turns": f"{size.num_turns} of each kind, {size.counted_seconds:g} s counted",
    }
    return run("mixed_engines", options, conditions, measure)


@asynccontextmanager
async def _fleet(model: Path, folder: Path, python: str, exactness: str, progress: Progress) -> AsyncIterator[Fleet]:
    flags = ("--model", str(model), "--exactness", exactness, *_SMALL)
    async with Fleet(folder, local_prefill="auto") as fleet:
        for name, engine in ((_OURS, ()), (_VLLM, ("--engine", "vllm", "--vllm-python", python))):
            progress(f"starting {name}")
            fleet.start("decode", name, *flags, *engine)
        await fleet.ready(seconds=_START_SECONDS)
        pin_engines([fleet.services[name].process.pid for name in (_OURS, _VLLM)])
        yield fleet


async def _measure(outcome: Outcome, fleet: Fleet, size: Size, progress: Progress) -> None:
    worker = fleet.worker(_OURS)
    assert worker is not None, "ready before"
    model_id = worker.info.card.model_id
    half = size.num_streams // 2
    loads = {
        "direct": [(fleet.dispatcher(_OURS), half), (fleet.dispatcher(_VLLM), half)],
        "routed": [(fleet.gateway.dispatcher, 2 * half)],
    }
    prompts = _prompts()
    counts: dict[str, list[Counter[str]]] = {kind: [] for kind in loads}
    for number in range(size.num_turns + 1):  # the first turn teaches the router the speeds
        for kind in loads if number % 2 else reversed(loads):
            progress(f"turn {number} of {size.num_turns}, {kind}")
            counts[kind].append(await _turn(loads[kind], model_id, prompts, size))
    _enter(outcome, {kind: each[1:] for kind, each in counts.items()}, size)


async def _turn(
    loads: Sequence[tuple[Dispatcher, int]], model_id: str, prompts: Iterator[list[int]], size: Size
) -> Counter[str]:
    """Return the tokens that each worker gave in the middle part."""
    count = Count()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_stream(dispatcher, model_id, prompts, count))
            for dispatcher, num_streams in loads
            for _ in range(num_streams)
        ]
        await asyncio.sleep(size.ramp_seconds)
        count.is_open = True
        await asyncio.sleep(size.counted_seconds)
        count.is_open = False
        for task in tasks:
            task.cancel()
    return count.tokens


async def _stream(dispatcher: Dispatcher, model_id: str, prompts: Iterator[list[int]], count: Count) -> None:
    """Ask for one answer after another until cancelled."""
    while True:
        request = token_request(model_id, next(prompts), _NUM_TOKENS, cacheable=False)
        stream = await dispatcher.submit(request)
        try:
            async for delta in stream:
                call = stream.state.choices[0].call
                if call is not None:
                    count.add(call.worker_id, len(delta.token_ids))
        finally:
            await stream.aclose()


def _prompts() -> Iterator[list[int]]:
    chance = random.Random(1)
    while True:
        yield [chance.randrange(3, 2000) for _ in range(_NUM_PROMPT_TOKENS)]


def _enter(outcome: Outcome, counts: dict[str, list[Counter[str]]], size: Size) -> None:
    rows: Rows = []
    rates: dict[str, list[float]] = {}
    for kind, turns in counts.items():
        rates[kind] = [each.total() / size.counted_seconds for each in turns]
        medians = {
            name: percentile([each[name] / size.counted_seconds for each in turns], 50) for name in (_OURS, _VLLM)
        }
        total = percentile(rates[kind], 50)
        rows.append((kind, *(f"{medians[name]:.1f}" for name in (_OURS, _VLLM)), f"{total:.1f}"))
        outcome.figures |= {f"{kind}.{name}": value for name, value in medians.items()} | {f"{kind}.total": total}
    outcome.sheets.append(Sheet("tokens per second, medians of the turns", ("load", _OURS, _VLLM, "both"), rows))
    ratio = median_of_ratios(rates["direct"], rates["routed"], is_time=False)
    outcome.figures |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    text = f"routed is {ratio.value:.3f} of direct ({ratio.low:.3f} to {ratio.high:.3f}), {MIN_RATIO} wanted"
    outcome.targets.append(Target(text, ratio.value >= MIN_RATIO))


if __name__ == "__main__":
    sys.exit(main())
