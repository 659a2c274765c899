"""Kills a writing process 50 times and checks that the disk tier never serves a bad block."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kv_transfer_svc.disk import DiskTier
from tests.kv_transfer_svc.disk.blocks import a_key, a_payload
from tests.kv_transfer_svc.disk.writers import size_of

_NUM_KILLS = 50
_MAX_BYTES_BEFORE_A_KILL = 4_000_000
_REPOSITORY = Path(__file__).parents[3]


@dataclass
class Life:
    """The output of a writer before it was killed. The blocks are numbered from `first` on."""

    first: int
    last: int = -1
    kept: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("budget_bytes", "segment_bytes"),
    [pytest.param(1 << 30, 1 << 20, id="with_room_for_all"), pytest.param(6 << 20, 1 << 20, id="with_room_for_few")],
)
async def test_fifty_kills_in_the_middle_of_writes_serve_no_bad_block(
    tmp_path: Path, budget_bytes: int, segment_bytes: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    folder = tmp_path / "tier"
    has_room = budget_bytes == 1 << 30
    next_number = 1
    num_discarded = 0
    kept: set[int] = set()
    async with writers() as zygote:
        for _ in range(_NUM_KILLS):
            num_bytes = chance.randrange(_MAX_BYTES_BEFORE_A_KILL)
            life = await killed_after(zygote, num_bytes, folder, next_number, budget_bytes, segment_bytes)
            next_number = life.last + 2  # the writer may have queued one block more than it printed
            tier = DiskTier(folder, budget_bytes, segment_bytes)
            await tier.open()
            try:
                tier.check()
                num_discarded += tier.stats().counters.discarded
                found = await _verified(tier, range(life.first if has_room else 1, next_number))
                assert not has_room or found >= set(life.kept), "a block is lost that was not being written"
                kept.update(life.kept)
                await _goes_on(tier, next_number)
                next_number += 1
                tier.check()
                assert tier.stats().counters.disk_corrupt == 0
            finally:
                await tier.close()
    tier = DiskTier(folder, budget_bytes, segment_bytes)
    await tier.open()
    found = await _verified(tier, range(1, next_number))
    await tier.close()
    assert not has_room or found >= kept
    print(f"{len(found)} of {next_number - 1} blocks are served, {num_discarded} torn records were discarded")


async def killed_after(
    zygote: asyncio.subprocess.Process,
    num_bytes: int,
    folder: Path,
    first: int,
    budget_bytes: int,
    segment_bytes: int,
) -> Life:
    """Let a writer write from block `first` on, and kill it once it has queued `num_bytes`."""
    assert zygote.stdin is not None and zygote.stdout is not None
    zygote.stdin.write(f"{folder} {first} {budget_bytes} {segment_bytes}\n".encode())
    life = Life(first)
    pid = 0
    async for line in zygote.stdout:
        match line.decode().split():
            case ["pid", number]:
                pid = int(number)
            case ["put", number, size]:
                life.last = int(number)
                num_bytes -= int(size)
                if num_bytes <= 0 and pid:
                    os.kill(pid, signal.SIGKILL)
                    pid = 0
            case ["kept", number]:
                life.kept.append(int(number))
            case ["ended", status]:
                assert int(status) == -signal.SIGKILL
                return life
    raise AssertionError("the writers ended early")


@asynccontextmanager
async def writers() -> AsyncIterator[asyncio.subprocess.Process]:
    path = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "protos" / "gen"), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kv_transfer_svc.disk.writers",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _verified(tier: DiskTier, numbers: Sequence[int]) -> set[int]:
    """Return which blocks are served; each must be what was written, byte for byte."""
    served = set()
    for number in numbers:
        if a_key(number) in tier:
            (block,) = await tier.get([a_key(number)])
            assert block is not None and bytes(block.payload) == a_payload(number, size_of(number)), f"block {number}"
            served.add(number)
    return served


async def _goes_on(tier: DiskTier, number: int) -> None:
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    assert tier.put(a_key(number), a_payload(number, size_of(number)), done=done.set_result)
    assert await done
    assert await _verified(tier, [number]) == {number}
