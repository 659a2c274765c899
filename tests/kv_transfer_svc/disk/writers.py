"""Who writes blocks until it is killed?

Run as a module: it imports once, and for each line `folder first_number budget_bytes segment_bytes` it forks a writer,
a whole process with a disk tier of its own, which says on stdout

    pid <pid>              it is about to write
    put <number> <bytes>   it has queued a block
    kept <number>          that block is written

and goes on until a signal ends it. Then `ended <status>` follows: all that it said has been said.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from kv_transfer_svc.disk import DiskTier
from tandem_runtime.log import configure
from tests.kv_transfer_svc.disk.blocks import a_key, a_payload

_MAX_IN_FLIGHT = 16
_MOST_PAYLOAD_BYTES = 400_000


def size_of(number: int) -> int:
    return number * 7919 % _MOST_PAYLOAD_BYTES


def main() -> None:
    configure("writers", level="warning")
    for line in sys.stdin:
        folder, *numbers = line.split()
        writer = os.fork()
        if writer == 0:
            asyncio.run(_write(Path(folder), *map(int, numbers)))
        _, status = os.waitpid(writer, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


async def _write(folder: Path, number: int, budget_bytes: int, segment_bytes: int) -> None:
    tier = DiskTier(folder, budget_bytes, segment_bytes)
    await tier.open()
    in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
    _say(f"pid {os.getpid()}")

    def done(number: int, is_kept: bool) -> None:
        if is_kept:
            _say(f"kept {number}")
        in_flight.release()

    while True:
        await in_flight.acquire()
        payload = a_payload(number, size_of(number))
        assert tier.put(a_key(number), payload, done=partial(done, number))
        _say(f"put {number} {len(payload)}")
        if number % 3 == 0:  # so that some are used, and move when their segment goes
            await tier.get([a_key(max(0, number - 6))])
        number += 1


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
