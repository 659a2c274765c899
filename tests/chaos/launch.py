"""Starts a service on a faulty network: `python -m tests.chaos.launch prefill_svc FLAGS...`

TANDEM_CHAOS_SEED seeds the faults of this process, TANDEM_CHAOS_COUNTS names the file of counts.

It starts with a low priority if `tests.chaos.priorities` says so.

If no Python code runs for 25 s, the stacks of all threads are written to the log: a library keeps the interpreter lock.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
import threading
from pathlib import Path

from tests.chaos.injection import Injector
from tests.chaos.priorities import lower_if_asked

SEED = "TANDEM_CHAOS_SEED"
COUNTS = "TANDEM_CHAOS_COUNTS"


_FROZEN_SECONDS = 25.0
_REARM_SECONDS = 2.0


def main() -> None:
    service = sys.argv[1]
    sys.argv = [service, *sys.argv[2:]]
    lower_if_asked()
    threading.Thread(target=_dump_if_frozen, name="frozen", daemon=True).start()
    with Injector(os.environ[SEED], Path(os.environ[COUNTS])).installed():
        runpy.run_module(service, run_name="__main__", alter_sys=True)


def _dump_if_frozen() -> None:
    while True:
        faulthandler.dump_traceback_later(_FROZEN_SECONDS)
        threading.Event().wait(_REARM_SECONDS)


if __name__ == "__main__":
    main()
