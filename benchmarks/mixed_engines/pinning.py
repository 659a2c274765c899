"""Pins the engine process of each worker to a core of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import psutil

_ENGINES = ("tandem_vllm", "tandem_engine.process")
"""In the command line of an engine process."""


def pin_engines(fronts: Sequence[int]) -> None:
    """Pin all threads of the engine below each worker's process to one core; the cores are taken in turn.

    Raises RuntimeError where a worker has no engine process, or several.
    """
    cores = sorted(os.sched_getaffinity(0))
    for number, front in enumerate(fronts):
        engine = _engine_of(psutil.Process(front))
        for thread in engine.threads():
            with suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(thread.id, {cores[number % len(cores)]})


def _engine_of(front: psutil.Process) -> psutil.Process:
    children = front.children(recursive=True)
    found = [each for each in children if any(name in each.cmdline() for name in _ENGINES)]
    if len(found) != 1:
        raise RuntimeError(f"worker {front.pid} has engine processes {[each.pid for each in found]}, one is needed")
    return found[0]
