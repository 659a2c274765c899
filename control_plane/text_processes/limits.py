"""Bounds the process that calls: its memory, its processor time and its priority."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tandem_machine.own_memory import data_bytes

_OOM_SCORE = "800"
_SPARE_CPU_SECONDS = 5
"""The gateway ends a job at its limit; the kernel, whose clock has whole seconds, a little later."""


def die_first() -> None:
    """When the machine has no memory left, end this process before the services."""
    with contextlib.suppress(OSError):  # not Linux, or not permitted
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def allow_memory(num_bytes: int | None, now: int | None = None) -> None:
    """Let this process have `num_bytes` more than it has now; None: no bound. Linux only.

    `now`: what `OwnMemory` says, if the caller has one open.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = resource.RLIM_INFINITY
    if num_bytes is not None:
        now = data_bytes() if now is None else now
        if not now:
            return
        soft = now + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (_within(soft, hard), hard))


def allow_cpu(seconds: float | None) -> None:
    """Let this process have so much more processor time, and some spare seconds; None: no bound."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = resource.RLIM_INFINITY
    if seconds is not None:
        soft = int(time.process_time() + seconds) + 1 + _SPARE_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (_within(soft, hard), hard))


class TookTooLong(BaseException):
    """Raised in the midst of code that has no business catching it."""


@contextlib.contextmanager
def within_cpu(seconds: float) -> Iterator[None]:
    """Raise TookTooLong inside once this process has computed for so long. In a process with one thread only."""

    def end(signum: int, frame: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def forget_signals() -> None:
    """Leave ends to the gateway: a terminal's Ctrl-C reaches the whole group. Children need no wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def keep_only(descriptor: int) -> None:
    """Close every descriptor but this one and the standard ones, which other processes wait for."""
    most = 1 << 20
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, most)


def _within(soft: int, hard: int) -> int:
    return soft if hard == resource.RLIM_INFINITY else min(soft, hard) if soft != resource.RLIM_INFINITY else hard
