"""Runs one part of a benchmark in a checkout, and reads its figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.stats import Figures
from tandem_client.cli.parent_death import die_with_parent

_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Part:
    """The part of a benchmark that gives a figure, and the figures that are compared."""

    arguments: tuple[str, ...]
    rates: str
    """A pattern of figure names; higher is better."""
    times: str
    """A pattern of figure names; lower is better."""

    def is_time(self, figure: str) -> bool | None:
        """Return whether a figure is a time or a rate; None if it is not compared."""
        if re.fullmatch(self.times, figure):
            return True
        return False if re.fullmatch(self.rates, figure) else None


_NEVER = r"(?!)"
PARTS = {
    "engine": Part(
        ("--shapes", "M", "--peers", "", "--variants", "tandem_lean_fp32,tandem_lean_bf16"),
        rates=r"M\.\w+\.\w+\.tokens_per_second",
        times=_NEVER,
    ),
    "gateway": Part(("--only", "rates"), rates=r"(native|chat)\.per_cpu_second", times=_NEVER),
    "handover": Part(
        ("--shapes", "0.1b"), rates=_NEVER, times=r".*\.disaggregated\.(gap_ms\.p50|ttft_ms\.p50|decode_step_ms)"
    ),
    "isolation_itl": Part(
        ("--systems", "disaggregated,aggregated", "--chunks", "64", "--seconds", "45", "--rounds", "1"),
        rates=r"(dis)?aggregated\.(stream|prompt)_tokens_per_second",
        times=r"(dis)?aggregated\.(itl_ms\.p50|itl_ms\.p99|ttft_s\.p50)",
    ),
    "speculation": Part((), rates=r".*\.ratio", times=_NEVER),
}


def measure(root: Path, benchmark: str, arguments: list[str], file: Path) -> Figures:
    """Return the flat figures of one run in the checkout `root`. Raises RuntimeError if the run wrote none.

    A run that misses a target ends with 1, and counts all the same.
    """
    command = die_with_parent([sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--json", str(file)])
    paths = os.pathsep.join((str(root), str(root / "protos" / "gen")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
    )
    if not file.exists():
        raise RuntimeError(f"{' '.join(command)} in {root} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(file.read_text())["figures"]
    return figures
