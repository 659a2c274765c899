"""Runs the simulation for long: `python -m tests.kv_transfer_svc.simulation --steps 100000 --seed 1`.

The steps are split into runs of 1,000 steps, and each run comes to rest at its end. A failed run prints its seed;
`--seed SEED --runs 1` repeats the run.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time

from tests.kv_transfer_svc.simulation.runner import Totals, run_seed
from tests.kv_transfer_svc.simulation.truth import Violation

_STEPS_PER_RUN = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="Run KV handles through faults, and check every step.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--runs", type=int, help="number of runs; if unset, as many as the steps need")
    options = parser.parse_args()
    num_runs = options.runs or -(-options.steps // _STEPS_PER_RUN)
    print(f"seed {options.seed}, {num_runs} runs of {_STEPS_PER_RUN} steps", flush=True)
    gc.set_threshold(100_000)  # a run creates no garbage before its end
    totals, started = Totals(), time.perf_counter()
    for number in range(num_runs):
        try:
            run_seed(options.seed + number, _STEPS_PER_RUN, totals)
        except Violation:
            return 1
        if (number + 1) % 20 == 0:
            print(f"{(number + 1) * _STEPS_PER_RUN} steps, {time.perf_counter() - started:.0f} s", flush=True)
    totals.print()
    wall, used = time.perf_counter() - started, time.process_time()
    print(
        f"\nheld: {num_runs * _STEPS_PER_RUN} steps, {totals.num_events} events, {totals.virtual_seconds:.0f} "
        f"virtual seconds, in {wall:.0f} s ({used:.0f} s of CPU), seed {options.seed}"
    )
    print("edges never taken: " + ("; ".join(totals.missing) or "none"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
