"""Ends child processes when their parent process is killed with SIGKILL.

This file is also a program: it asks Linux for SIGTERM at its parent's death, then executes a command. A `preexec_fn`
would do the same in the forked child, but Python code after a fork can crash in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and sends it SIGTERM when this process dies; on Linux only."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # outlives exec
    if os.getppid() != parent:  # the parent has died before prctl, so there will be no signal
        sys.exit(128 + signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
