"""Lets a thread compute for tens of milliseconds beside an event loop that needs the interpreter lock in every turn."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN_SECONDS = 0.0005
"""A thread that waits for the interpreter lock gets it after so long, instead of after 5 ms."""

_lock = threading.Lock()
_num_inside = 0
_before = (sys.getswitchinterval(), True)


@contextmanager
def beside_the_loop() -> Iterator[None]:
    """Switch threads often, and collect no garbage: a collection over a large heap holds the lock for 50 ms.

    For work that makes many objects and no cycles. Blocks may overlap, in any threads.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _before
    with _lock:
        _num_inside += 1
        if _num_inside == 1:
            _before = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(_TURN_SECONDS)
            gc.disable()


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            switch_seconds, is_collecting = _before
            sys.setswitchinterval(switch_seconds)
            if is_collecting:
                gc.enable()
