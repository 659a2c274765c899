"""Measures what Tandem costs beside vLLM's own server, with the same build, settings and core.

    TANDEM_VLLM_PYTHON=build/vllm/bin/python python -m benchmarks.vllm_cost [--only adapter|throughput|gap] [--quick]

`throughput`: `vllm serve` and Tandem (gateway and one worker with vLLM) are up together and take turns; each engine
has the first core, everything else the other one. A round is 1, 8 or 32 streams at once of /v1/completions.
`adapter`: CPU time in the engine's process that is not vLLM's, per step, for three kinds of sampling.
`gap`: the time between tokens one and two where a prefill and a decode worker with vLLM answer, beside later gaps.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.prompts import prompts
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from benchmarks.lib.streaming import new_client
from benchmarks.vllm_cost.adapter import measure_adapter
from benchmarks.vllm_cost.gap import measure_gaps
from benchmarks.vllm_cost.servers import Server, pin, tandem, vllm_alone
from tandem_engine.demo import checkpoint_path

_ROUNDS = {1: 12, 8: 6, 32: 4}
_NUM_TOKENS = 32
_NUM_PROMPT_TOKENS = 16
_MIN_RATIO = 0.95
_MAX_SHARE = 0.15
_BUILT_IN = "built-in"
"""Judged by no target: its step is shorter than the work of an HTTP server."""
_MODELS = (_BUILT_IN, "0.5b")
_PARTS = ("adapter", "throughput", "gap")
_MAX_ADDED_SECONDS = 0.010
_NUM_GAPS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    parsing = parser("vllm_cost", __doc__ or "", "the built-in model alone, two rounds")
    parsing.add_argument("--only", choices=_PARTS, help="measures this part alone")
    parsing.add_argument("--models", nargs="+", choices=_MODELS, default=_MODELS, help="(default: both)")
    parsing.add_argument(
        "--streams", nargs="+", type=int, choices=_ROUNDS, default=list(_ROUNDS), help="(default: all)"
    )
    parsing.add_argument("--turn", type=Path, help="hold this file's lock while measuring: for machines in turns")
    options = parsing.parse_args(arguments)
    if options.quick:
        options.models = [_BUILT_IN]
    python = os.environ.get("TANDEM_VLLM_PYTHON", "")
    if not python:
        raise SystemExit("TANDEM_VLLM_PYTHON must name the interpreter of an environment with vLLM")
    python = str(Path(python).absolute())  # servers have other folders; a link is kept: it names the environment

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        models = {name: checkpoint_path() if name == _BUILT_IN else made(folder, "qwen") for name in options.models}
        rounds = {batch: 2 if options.quick else _ROUNDS[batch] for batch in options.streams}
        for name, model in models.items():
            place = folder / name
            place.mkdir()
            if options.only in (None, "adapter"):
                progress(f"{name}: one engine process")
                await _adapter(outcome, name, python, model, place)
            if options.only in (None, "throughput"):
                await _throughput(outcome, name, python, model, place, rounds, options.turn, progress)
            if options.only in (None, "gap"):
                progress(f"{name}: a prefill and a decode worker")
                with _holding(options.turn):
                    await _gap(outcome, name, python, model, place)

    return run("vllm_cost", options, {"tokens": f"{_NUM_PROMPT_TOKENS} + {_NUM_TOKENS}"}, measure)


async def _adapter(outcome: Outcome, name: str, python: str, model: Path, folder: Path) -> None:
    rows: Rows = []
    for (sampling, batch), busy in (await measure_adapter(python, model, folder, tuple(_ROUNDS), _NUM_TOKENS)).items():
        step, own, draw = (1e3 * seconds / busy.steps for seconds in (busy.cpu, busy.own, busy.draw))
        rows.append((sampling, str(batch), f"{step:.2f}", f"{own:.3f}", f"{draw:.3f}", f"{busy.share:.3f}"))
        figure = f"{name}.adapter.{sampling}.{batch}"
        outcome.figures |= {f"{figure}.step_ms": step, f"{figure}.own_ms": own, f"{figure}.share": busy.share}
        if name != _BUILT_IN:
            text = f"{figure}: Tandem's CPU time is {busy.share:.3f} of a step, {_MAX_SHARE} at most"
            outcome.targets.append(Target(text, busy.share <= _MAX_SHARE))
    head = ("sampling", "requests", "ms per step", "Tandem's", "of it the draw", "share")
    outcome.sheets.append(Sheet(f"{name}: CPU time of the engine's thread", head, rows))


async def _throughput(
    outcome: Outcome,
    model_name: str,
    python: str,
    model: Path,
    folder: Path,
    rounds: dict[int, int],
    turn: Path | None,
    progress: Progress,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    rows: Rows = []
    head = ("streams", "vllm serve, tokens/s", "Tandem, tokens/s", "ratio", "95 % interval")
    outcome.sheets.append(Sheet(f"{model_name}: throughput, engines on one core", head, rows))
    async with AsyncExitStack() as stack:
        sides: dict[str, Server] = {}
        for name, start in (("vllm serve", vllm_alone), ("tandem", tandem)):
            progress(f"{model_name}: starting {name}")
            sides[name] = await stack.enter_async_context(start(python, model, folder))
            pin(sides[name], cores[0], cores[-1])
        os.sched_setaffinity(0, {cores[-1]})
        clients = {name: await stack.enter_async_context(new_client(side.base_url)) for name, side in sides.items()}
        texts = prompts(model, _NUM_PROMPT_TOKENS)
        with _holding(turn):
            for batch, num_rounds in rounds.items():
                rates: dict[str, list[float]] = {name: [] for name in sides}
                for number in range(num_rounds + 1):
                    progress(f"{model_name}: {batch} streams, round {number} of {num_rounds}")
                    for name in sides if number % 2 else reversed(sides):
                        asked = list(islice(texts, batch))
                        rates[name].append(await _rate(clients[name], sides[name].model, asked))
                rows.append(_row(outcome, model_name, batch, {name: each[1:] for name, each in rates.items()}))


async def _gap(outcome: Outcome, name: str, python: str, model: Path, folder: Path) -> None:
    gaps = await measure_gaps(python, model, folder, _NUM_GAPS)
    numbers = [1e3 * percentile(each, percent) for each in (gaps.first, gaps.steps) for percent in (50, 95)]
    outcome.figures |= {
        f"{name}.gap.first_ms": numbers[0],
        f"{name}.gap.later_ms": numbers[2],
        f"{name}.gap.added_ms": 1e3 * gaps.added,
        f"{name}.gap.num_computed_tokens": gaps.num_computed_tokens,
    }
    row = (*(f"{number:.1f}" for number in numbers), f"{1e3 * gaps.added:.1f}", str(gaps.num_computed_tokens))
    head = ("tokens one to two, ms p50", "p95", "later ones, ms p50", "p95", "added, ms", "prompt tokens computed")
    outcome.sheets.append(Sheet(f"{name}: the gap of a hand-over", head, [row]))
    text = f"{name}: the hand-over adds {1e3 * gaps.added:.1f} ms to a step, {1e3 * _MAX_ADDED_SECONDS:.0f} at most"
    outcome.targets.append(Target(text, gaps.added <= _MAX_ADDED_SECONDS))


def _row(outcome: Outcome, model: str, batch: int, rates: dict[str, list[float]]) -> tuple[str, ...]:
    alone, ours = rates["vllm serve"], rates["tandem"]
    ratio = median_of_ratios(alone, ours, is_time=False)
    name = f"{model}.throughput.{batch}"
    medians = [percentile(each, 50) for each in (alone, ours)]
    outcome.figures |= {
        f"{name}.vllm_serve": medians[0],
        f"{name}.tandem": medians[1],
        f"{name}.ratio": ratio.value,
        f"{name}.low": ratio.low,
        f"{name}.high": ratio.high,
    }
    text = f"{name}: {ratio.value:.3f} of vllm serve ({ratio.low:.3f} to {ratio.high:.3f}), {_MIN_RATIO} wanted"
    if model != _BUILT_IN:
        outcome.targets.append(Target(text, ratio.value >= _MIN_RATIO))
    numbers = (f"{medians[0]:.1f}", f"{medians[1]:.1f}", f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}")
    return (str(batch), *numbers)


async def _rate(client: httpx.AsyncClient, model: str, texts: Sequence[str]) -> float:
    """Return the tokens per second of these streams, all at once."""
    started = time.perf_counter()
    numbers = await asyncio.gather(*(_stream(client, model, text) for text in texts))
    return sum(numbers) / (time.perf_counter() - started)


async def _stream(client: httpx.AsyncClient, model: str, text: str) -> int:
    asked: dict[str, Any] = {
        "model": model,
        "prompt": text,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] | None = None
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if not answer.is_success:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line.replace(" ", ""):
                usage = json.loads(line[6:])["usage"]
    assert usage is not None and usage["completion_tokens"] == _NUM_TOKENS, f"an answer of {usage}"
    return usage["completion_tokens"]


@contextmanager
def _holding(turn: Path | None) -> Iterator[None]:
    if turn is None:
        yield
        return
    with turn.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
