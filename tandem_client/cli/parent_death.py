"""How do children end when their supervisor is killed with -9, and can no longer end them?"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> Callable[[], None] | None:
    """Return what a child runs before it becomes its program: Linux then sends it SIGTERM when we die.

    It drains, as on any SIGTERM. None where the kernel offers no such thing.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # before the fork: a child of a process with threads must not import or allocate much
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between, and the signal would never come
            os.kill(os.getpid(), signal.SIGTERM)

    return arm
