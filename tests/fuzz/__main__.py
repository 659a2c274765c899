"""Fuzzes every byte parser: `make fuzz`, 2 minutes each; `make fuzz ARGS=--long`, 10 minutes each.

python -m tests.fuzz [--seconds N] [--long] [--only NAME] [--jobs N]

Each parser begins with its seeds and the committed inputs of `corpus/NAME`. New inputs that reach new code stay in
`build/fuzz/NAME` and serve the next run. A finding is printed and written to `build/fuzz/NAME-crash-*`: copy it to
`corpus/NAME` with the fix, where the tests feed it from then on.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.names import MODULES
from tests.fuzz.parsers import PARSERS

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).with_name("corpus")
_FOUND = ROOT / "build" / "fuzz"
_SECONDS, _LONG_SECONDS = 120, 600
_HANG_SECONDS = 10
_MAX_MEMORY_MB = 2048
_MAX_INPUT_BYTES = 1 << 16
_TAIL_LINES = 40


@dataclass(frozen=True)
class Run:
    name: str
    num_inputs: int
    num_edges: int
    finding: str
    """The end of the output; "" if there is none."""

    @property
    def line(self) -> str:
        result = "FOUND" if self.finding else "clean"
        return f"{self.name:<16} {self.num_inputs:>10,} inputs {self.num_edges:>6,} edges  {result}"


def main(arguments: Sequence[str] | None = None) -> int:
    options_of = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    options_of.add_argument("--seconds", type=int, default=_SECONDS, help="for each parser (default %(default)s)")
    options_of.add_argument("--long", action="store_true", help=f"{_LONG_SECONDS} s for each parser")
    options_of.add_argument("--only", choices=sorted(MODULES), help="fuzz this parser alone")
    options_of.add_argument("--jobs", type=int, default=1, help="parsers at a time (default %(default)s)")
    options = options_of.parse_args(arguments)
    seconds = _LONG_SECONDS if options.long else options.seconds
    names = [options.only] if options.only else list(MODULES)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = []
        for run in pool.map(lambda name: fuzz(name, seconds), names):
            print(run.line, flush=True)
            if run.finding:
                print(run.finding, flush=True)
            runs.append(run)
    return 1 if any(run.finding for run in runs) else 0


def fuzz(name: str, seconds: int) -> Run:
    """Fuzz one parser in a process of its own."""
    found = _FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(PARSERS[name].seeds()):
        (found / f"seed-{index}").write_bytes(seed)
    folders = [str(found), *([str(CORPUS / name)] if (CORPUS / name).is_dir() else [])]
    command = [sys.executable, "-m", "tests.fuzz.atheris_run", name, *folders]
    command += [f"-max_total_time={seconds}", f"-timeout={_HANG_SECONDS}", f"-rss_limit_mb={_MAX_MEMORY_MB}"]
    command += [f"-max_len={_MAX_INPUT_BYTES}", f"-artifact_prefix={_FOUND}/{name}-", "-print_final_stats=1"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    tail = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
    return Run(
        name,
        num_inputs=_last_number(r"stat::number_of_executed_units:\s*(\d+)", done.stdout),
        num_edges=_last_number(r"\bcov: (\d+)", done.stdout),
        finding=tail if done.returncode else "",
    )


def _last_number(pattern: str, text: str) -> int:
    numbers = re.findall(pattern, text)
    return int(numbers[-1]) if numbers else 0


if __name__ == "__main__":
    sys.exit(main())
