"""Starts a service on a faulty network: `python -m tests.chaos.launch prefill_svc FLAGS...`

TANDEM_CHAOS_SEED seeds the faults of this process, TANDEM_CHAOS_COUNTS names the file of counts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.chaos.injection import Injector

SEED = "TANDEM_CHAOS_SEED"
COUNTS = "TANDEM_CHAOS_COUNTS"


def main() -> None:
    service = sys.argv[1]
    sys.argv = [service, *sys.argv[2:]]
    with Injector(os.environ[SEED], Path(os.environ[COUNTS])).installed():
        runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
