"""Runs Tandem's engine with the number of threads that it chooses by itself, in a cgroup if one is named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.protocol import Load, serve
from benchmarks.peers.tandem_engine import TandemEngine
from tandem_engine.cores import num_threads, use_cores
from tandem_engine.settings import EngineConfig
from tandem_machine.cores import allowed_cores

CGROUP = "BENCHMARK_CGROUP"
"""The folder of the cgroup to join."""
IGNORES_QUOTA = "BENCHMARK_IGNORES_QUOTA"
"""Compute with a thread for each core of the affinity."""


class LimitedEngine(TandemEngine):
    """An engine that reads what it may use, as `tandem_engine.process` does."""

    def load(self, what: Load) -> None:
        ignores_quota = IGNORES_QUOTA in os.environ
        config = EngineConfig(model=what.model, num_threads=len(allowed_cores()) if ignores_quota else None)
        use_cores(config)
        super().load(replace(what, num_threads=num_threads(config)))


if __name__ == "__main__":
    if folder := os.environ.get(CGROUP):
        Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    serve(LimitedEngine())
