"""Lets other processes of the machine compute first."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICE = 10
_AUTOGROUP = Path("/proc/self/autogroup")


def run_in_background(*, with_session: bool = False) -> None:
    """Yield the processor to other processes, for the rest of this process's life.

    Linux divides the processor between sessions before it looks at niceness. `with_session`: if this process's parent
    leads the session, as a worker under `tandem up` does, the session yields, too; a terminal's session never does.
    """
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if with_session and os.getsid(0) == os.getppid():
        with contextlib.suppress(OSError):  # a kernel without autogroups, or one that does not permit this
            _AUTOGROUP.write_text(str(_NICE))
