"""Ends a process whose interpreter is frozen, so that its supervisor starts another one.

A library that waits for a lock of its own while it holds the interpreter lock stops every thread of Python: no
heartbeat leaves, no signal is handled, no line is logged. A timer of `faulthandler`, a thread of C that needs no
interpreter lock, then writes the stacks of all threads to stderr and ends the process with status 1.

A thread puts the timer off again and again while it gets its turns, so a busy event loop never ends a process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
from collections.abc import Iterator

FROZEN_SECONDS = 60.0
"""No thread of Python has run for this long. A process that was stopped (SIGSTOP, a paused container) for longer ends
when it goes on: its heartbeats and leases ended long before."""
_PUT_OFFS = 12
"""The timer is put off as often in `FROZEN_SECONDS`."""


@contextlib.contextmanager
def watched(seconds: float = FROZEN_SECONDS) -> Iterator[None]:
    """End this process inside the block if no thread of Python runs for `seconds`; once per process at a time."""
    is_over = threading.Event()
    thread = threading.Thread(target=_put_off, args=(seconds, is_over), name="frozen-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _put_off(seconds: float, is_over: threading.Event) -> None:
    while not is_over.is_set():
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
        is_over.wait(seconds / _PUT_OFFS)
