"""Measures what a step's message with 256 tokens costs a gateway, in this checkout beside another one.

    python -m benchmarks.step_batch --old FOLDER [--quick] [--json FILE] [--markdown FILE]

From the bytes of the message until 256 streams have their tokens: the worker's link, requests, accounts' charges and
streams, in one process without a network. Both checkouts run by turns. What `ab --bench gateway` measures has the
writing of events as well, which takes three times as long.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from tandem_client.cli.parent_death import die_with_parent

MAX_MORE = 0.05
"""Of the other checkout's processor time."""
_STEPS = Path(__file__).with_name("steps.py")
_TIMEOUT_SECONDS = 120.0
_FULL, _QUICK = (12, 400), (2, 20)
"""Turns of both checkouts, and steps of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("step_batch", __doc__, "two short turns: does it still work?")
    options_of.add_argument("--old", type=Path, metavar="FOLDER", required=True, help="the checkout to compare with")
    options = options_of.parse_args(arguments)
    num_turns, num_steps = _QUICK if options.quick else _FULL
    conditions = {
        "steps": f"{num_steps} with a token of each of 256 answers, of each checkout in each turn; the median counts",
        "turns": f"{num_turns}; every second one has the checkouts the other way round",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        roots = {"old": options.old.resolve(), "new": Path.cwd()}
        found: dict[str, list[float]] = {side: [] for side in roots}
        for turn in range(num_turns):
            progress(f"turn {turn + 1} of {num_turns}")
            for side in roots if turn % 2 else reversed(roots):
                found[side].append(await asyncio.to_thread(seconds_per_token, roots[side], num_steps))
        enter(outcome, found["old"], found["new"])

    return run("step_batch", options, conditions, measure)


def seconds_per_token(root: Path, num_steps: int) -> float:
    """Return the median of a checkout's steps. Raises RuntimeError if the checkout cannot run them."""
    paths = os.pathsep.join((str(root), str(root / "protos" / "gen")))
    done = subprocess.run(
        die_with_parent([sys.executable, str(_STEPS), str(num_steps)]),
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{root} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return median(map(float, done.stdout.splitlines()[-1].split()))


def enter(outcome: Outcome, old: Sequence[float], new: Sequence[float]) -> None:
    """Enter the figures of both sides; turn `i` of both ran within the same seconds."""
    ratio = median_of_ratios(new, old, is_time=True)
    rows: Rows = [
        (name, f"{1e6 * median(values):.2f} us", f"{1e6 * min(values):.2f}", f"{1e6 * max(values):.2f}")
        for name, values in (("old", old), ("new", new))
    ]
    outcome.sheets.append(Sheet("Processor time per token", ("checkout", "median", "least", "most"), rows))
    outcome.figures |= {
        "old.us_per_token": 1e6 * median(old),
        "new.us_per_token": 1e6 * median(new),
        "new_over_old": ratio.value,
        "new_over_old.low": ratio.low,
        "new_over_old.high": ratio.high,
    }
    text = (
        f"a token costs {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of what it does in the other checkout"
    )
    outcome.targets.append(Target(f"{text}, at most {1 + MAX_MORE:g}", ratio.value <= 1 + MAX_MORE))


if __name__ == "__main__":
    sys.exit(main())
