"""How does one run the simulation for long? `python -m tests.kv_transfer_svc.simulation --steps 100000 --seed 1`

A run is many worlds of a thousand steps, each of which comes to rest at its end; world i of seed s has the seed that
is printed when it fails, and `--seed THAT --worlds 1` plays it again.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time

from tests.kv_transfer_svc.simulation.runner import Totals, play
from tests.kv_transfer_svc.simulation.truth import Violation

_STEPS_PER_WORLD = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="Play the life of KV handles under faults, and check every step.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--worlds", type=int, help="how many worlds; as many as the steps ask for if not given")
    options = parser.parse_args()
    num_worlds = options.worlds or -(-options.steps // _STEPS_PER_WORLD)
    print(f"seed {options.seed}, {num_worlds} worlds of {_STEPS_PER_WORLD} steps", flush=True)
    gc.set_threshold(100_000)  # nothing of a world is garbage before its end
    totals, started = Totals(), time.perf_counter()
    for number in range(num_worlds):
        try:
            play(options.seed + number, _STEPS_PER_WORLD, totals)
        except Violation:
            return 1
        if (number + 1) % 20 == 0:
            print(f"{(number + 1) * _STEPS_PER_WORLD} steps, {time.perf_counter() - started:.0f} s", flush=True)
    totals.print()
    wall, used = time.perf_counter() - started, time.process_time()
    print(
        f"\nheld: {num_worlds * _STEPS_PER_WORLD} steps, {totals.num_events} events, {totals.virtual_seconds:.0f} "
        f"virtual seconds, in {wall:.0f} s ({used:.0f} s of CPU), seed {options.seed}"
    )
    print("edges never taken: " + ("; ".join(totals.missing) or "none"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
