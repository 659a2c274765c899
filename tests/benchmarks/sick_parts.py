"""Parts of a kit that fail in every way; run by `benchmarks.gpu_kit.hands` in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.gpu_kit.part import Figures, LeftOut, Runs, Settings
from tandem_client.cli.parent_death import die_with_parent

HAS_CHILDREN = True


class Rig:
    """Counts the parts that this process has run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_runs = 0


@asynccontextmanager
async def open_rig(settings: Settings) -> AsyncIterator[Rig]:
    try:
        yield Rig(settings.folder)
    finally:
        (settings.folder / "closed").touch()


async def _count(rig: Rig) -> Figures:
    rig.num_runs += 1
    return {"num_runs": rig.num_runs, "variable": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


async def _fail(rig: Rig) -> Figures:
    raise ValueError("the card is on fire")


async def _leave_out(rig: Rig) -> Figures:
    raise LeftOut("this machine has no card")


async def _die(rig: Rig) -> Figures:
    """Die, and leave a process behind."""
    left = await asyncio.create_subprocess_exec("/bin/sleep", "600", cwd=rig.folder)
    os.write(2, f"CUDA error: an illegal memory access was encountered\nleft {left.pid}\n".encode())
    os.abort()


async def _hang(rig: Rig) -> Figures:
    """Start a process that says its id, and wait for ever."""
    child = await asyncio.create_subprocess_exec(*die_with_parent(["/bin/sleep", "600"]))
    os.write(2, f"child {child.pid}\n".encode())
    await asyncio.Event().wait()
    return {}


RUNS: Runs = {"count": _count, "again": _count, "fail": _fail, "leave_out": _leave_out, "die": _die, "hang": _hang}
