"""Kills owners and readers of device memory: `python -m tests.device_kills --count 1000 --seed 1`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from functools import partial

import structlog

from tests.cuda_driver import stub_folder
from tests.device_kills.driver import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="hand-overs to disturb")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.count} hand-overs", flush=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    started = time.monotonic()
    tally = asyncio.run(run(options.count, options.seed, stub_folder(), partial(print, flush=True)))
    print(f"{tally}\n{time.monotonic() - started:.0f} s; nothing leaked, nothing torn was read")


if __name__ == "__main__":
    main()
