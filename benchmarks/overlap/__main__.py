"""Measures what overlapping a step with the engine's other work brings: the time between two tokens.

    python -m benchmarks.overlap [--old DIR] [--rounds 5] [--threads N] [--quick]

Engine processes with overlap off and on, and the one of another checkout if there is one, are up together and take
turns; a round is an answer of 64 tokens to 1, 8 or 32 requests at once, greedy, over the engine's socket. A ratio is
old/new, or off/on without another checkout, so below 1 is worse.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.ab.turns import imports_from
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.served import ROOT
from benchmarks.lib.stats import percentile

_BATCHES = (1, 8, 32)
_NUM_TOKENS = 64
_NO_WORSE = 0.98
_NUM_THREADS = max(1, (os.cpu_count() or 2) - 1)
"""What an engine does beside a step, and the client, need a core that the kernels leave."""
_SIDE = Path(__file__).with_name("side.py")


class _Side:
    """One engine process behind `side.py`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, root: Path, load: Mapping[str, Any]) -> _Side:
        command = (sys.executable, str(_SIDE), json.dumps(load))
        side = cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=_environment(root)))
        await side._line()
        return side

    async def answer(self, batch: int) -> float:
        """Return the mean seconds between two tokens of `batch` answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n".encode())
        return float(await self._line())

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := await self._process.stdout.readline()):
            raise RuntimeError(f"an engine ended with {await self._process.wait()}; its error is above")
        return line.decode().strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a side is worse."""
    parsing = parser("overlap", __doc__ or "", "the built-in model alone, two rounds")
    parsing.add_argument("--old", type=Path, help="another checkout")
    parsing.add_argument("--rounds", type=int, default=5, help="of each side and batch (default: %(default)s)")
    parsing.add_argument("--threads", type=int, default=_NUM_THREADS, help="of each engine (default: %(default)s)")
    options = parsing.parse_args(arguments)
    num_rounds = 2 if options.quick else options.rounds
    old = None if options.old is None else options.old.resolve()

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        models = {"demo": "@tandem/demo"}
        if not options.quick:
            models["random, 103 M"] = str(made(folder, "0.1b"))
        for name, model in models.items():
            sizes = {"max_batch": _BATCHES[-1], "num_tokens": _NUM_TOKENS}
            load = {"model": model, "num_threads": options.threads, **sizes}
            await _compare(outcome, progress, name, load, old, num_rounds)

    return run("overlap", options, {"threads": options.threads, "rounds": num_rounds}, measure)


async def _compare(
    outcome: Outcome, progress: Progress, model: str, load: Mapping[str, Any], old: Path | None, num_rounds: int
) -> None:
    async with AsyncExitStack() as stack:
        sides: dict[str, _Side] = {}
        for name in (*(("old",) if old is not None else ()), "off", "on"):
            progress(f"{model}: starting {name}")
            root = old if old is not None and name == "old" else ROOT
            sides[name] = await _Side.start(root, {**load, "settings": {} if name == "old" else {"overlap": name}})
            stack.push_async_callback(sides[name].stop)
        rows: Rows = []
        for batch in _BATCHES:
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(num_rounds + 1):
                progress(f"{model}: {batch} answers, round {number} of {num_rounds}")
                for name in sides if number % 2 else reversed(sides):
                    seconds[name].append(await sides[name].answer(batch))
            rows += _rows(outcome, model, batch, {name: each[1:] for name, each in seconds.items()})
    head = ("answers", "overlap", "ms between tokens", "beside", "ratio", "95 % interval")
    outcome.sheets.append(Sheet(f"{model}, {load['num_threads']} threads", head, rows))


def _rows(outcome: Outcome, model: str, batch: int, seconds: Mapping[str, list[float]]) -> Rows:
    """Return a row per side; each is compared with the other checkout, or `on` with `off`."""
    base = next(iter(seconds))
    rows: Rows = []
    for name, each in seconds.items():
        milliseconds = 1e3 * percentile(each, 50)
        figure = f"{model}.{batch}.{name}"
        outcome.figures[f"{figure}.ms"] = milliseconds
        cells = (str(batch), name, f"{milliseconds:.2f}")
        if name == base:
            rows.append((*cells, "", "", ""))
            continue
        ratio = median_of_ratios(seconds[base], each, is_time=True)
        outcome.figures |= {f"{figure}.ratio": ratio.value, f"{figure}.low": ratio.low, f"{figure}.high": ratio.high}
        rows.append((*cells, base, f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"))
        text = f"{figure}: {ratio.low:.3f} to {ratio.high:.3f} of {base}, not wholly below {_NO_WORSE}"
        outcome.targets.append(Target(text, ratio.high >= _NO_WORSE))
    return rows


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, **imports_from(root)}


if __name__ == "__main__":
    sys.exit(main())
