"""Writers of blocks for the kill tests of the disk tier.

Run as a module. The module imports once, and forks a writer for each line `folder first_number budget_bytes
segment_bytes`. A writer is a whole process with a disk tier of its own. It prints

    pid <pid>              before it writes
    put <number> <bytes>   after it has queued a block
    kept <number>          after that block is written

and runs until a signal ends it. `ended <status>` follows after the last line of the writer.
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
_MAX_PAYLOAD_BYTES = 400_000


def size_of(number: int) -> int:
    return number * 7919 % _MAX_PAYLOAD_BYTES


def main() -> None:
    configure("writers", level="warning")
    for line in sys.stdin:
        folder, *numbers = line.split()
        writer = os.fork()
        if writer == 0:
            asyncio.run(_write(Path(folder), *map(int, numbers)))
        _, status = os.waitpid(writer, 0)
        _print_line(f"ended {os.waitstatus_to_exitcode(status)}")


async def _write(folder: Path, number: int, budget_bytes: int, segment_bytes: int) -> None:
    tier = DiskTier(folder, budget_bytes, segment_bytes)
    await tier.open()
    in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
    _print_line(f"pid {os.getpid()}")

    def done(number: int, is_kept: bool) -> None:
        if is_kept:
            _print_line(f"kept {number}")
        in_flight.release()

    while True:
        await in_flight.acquire()
        payload = a_payload(number, size_of(number))
        assert tier.put(a_key(number), payload, done=partial(done, number))
        _print_line(f"put {number} {len(payload)}")
        if number % 3 == 0:  # some blocks are used, and move when their segment is deleted
            await tier.get([a_key(max(0, number - 6))])
        number += 1


def _print_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
