"""How do children end when their supervisor is killed with -9, and can no longer end them?

This file is also a program: it asks Linux for SIGTERM when its parent dies, then becomes the command it is given. A
`preexec_fn` would do the same in the forked child, but Python code after a fork crashes in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Return `command` so that it drains, as on any SIGTERM, when this process dies; as it is where Linux is not."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # outlives exec
    if os.getppid() != parent:  # it died in between, and the signal would never come
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
