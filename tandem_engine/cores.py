"""Gives an engine process its cores and its number of threads."""

from __future__ import annotations

import contextlib
import os

from tandem_engine.errors import ModelUnusable
from tandem_engine.settings import EngineConfig
from tandem_machine.cores import allowed_cores, num_usable_cores
from tandem_machine.priority import run_in_background


def use_cores(config: EngineConfig) -> None:
    """Pin this process to `config.cpus` if there are any, and tell OpenMP its number of threads.

    Called before torch is imported: OpenMP counts cores once. Raises ModelUnusable for cores that it may not use.
    """
    if config.cpus:
        _pin(config.cpus)
    if config.is_background:
        run_in_background(with_session=True)
    threads = str(num_threads(config))
    os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def num_threads(config: EngineConfig) -> int:
    """Return how many threads compute: as configured, else one for each core that this process may use."""
    return config.num_threads or num_usable_cores()


def pinned_cores(config: EngineConfig) -> tuple[int, ...]:
    """Return the cores of the computing threads, one each; empty: the kernel places the threads.

    Only `config.cpus` pins: engines that were started without it would all choose the same cores.
    """
    threads = num_threads(config)
    return tuple(sorted(config.cpus)[:threads]) if 1 < threads <= len(config.cpus) else ()


def _pin(cores: tuple[int, ...]) -> None:
    """Run on `cores`, which may lie outside of the affinity that was inherited, but not outside of the cpuset."""
    with contextlib.suppress(OSError):  # none of them: told below
        os.sched_setaffinity(0, cores)
    if (allowed := allowed_cores()) != tuple(sorted(set(cores))):
        raise ModelUnusable(
            f"--cpus {_listed(cores)}: of these this process may use {_listed(allowed)} alone; choose cores that the "
            "machine or the container gives it, or leave --cpus out"
        )


def _listed(cores: tuple[int, ...]) -> str:
    return ",".join(map(str, cores))
