"""Faults of the machine under the processes. Each is held for some seconds and undone at the end, also of a failed run.

disk full      the whole fleet: a file takes all that is left of the disk, and what is given back meanwhile
read-only      the whole fleet: nothing on the disk can be made, replaced, deleted or opened to be written
descriptors    one process (a front, an engine, a KV service) can open two more at most
clock          the wall clock of one process, of a gateway too, jumps by an hour, ahead or back
clocks         the wall clocks of all processes jump together
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, get_args

import psutil

from tests.chaos.descriptors import used_up
from tests.chaos.surroundings import CONTROL, SECOND_GATEWAY, Surroundings
from tests.system.wall_clock import WallClock

FLEET = "fleet"
"""The name of all processes together."""
MachineKind = Literal["disk full", "read-only", "descriptors", "clock", "clocks"]
MACHINE_KINDS: tuple[MachineKind, ...] = get_args(MachineKind)
_REFILL_SECONDS = 0.1


class MachineFaults:
    """Holds the faults that the surroundings allow."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    @property
    def kinds(self) -> list[MachineKind]:
        """Return the faults that this machine has the means for."""
        of_disk: list[MachineKind] = ["disk full", "read-only"] if self._surroundings.disk is not None else []
        of_clocks: list[MachineKind] = ["clock", "clocks"] if self._surroundings.clocks else []
        return [*of_disk, "descriptors", *of_clocks]

    def victims(self, kind: MachineKind, services: Iterable[str]) -> Sequence[str]:
        """Return who can have a fault."""
        if kind == "descriptors":  # those of the control plane are the clients' too: both are in one process
            return sorted(services)
        return [*sorted(services), CONTROL, SECOND_GATEWAY] if kind == "clock" else [FLEET]

    async def hold(
        self, kind: MachineKind, victim: str, processes: Sequence[psutil.Process], hours: int, seconds: float
    ) -> None:
        """Hold a fault for some seconds; `processes` are those of the victim, of which descriptors end in one.

        What takes long is done in a thread: the event loop is a gateway's, too, and its pauses are measured.
        """
        if kind == "disk full":
            await self._fill(seconds)
            return
        held = ExitStack()
        try:
            await _to_the_end(lambda: self._begin(held, kind, victim, processes, hours))
            await asyncio.sleep(seconds)
        finally:
            await _to_the_end(held.close)

    def _begin(
        self, held: ExitStack, kind: MachineKind, victim: str, processes: Sequence[psutil.Process], hours: int
    ) -> None:
        if kind == "read-only":
            assert self._surroundings.disk is not None, "one of `kinds`"
            held.enter_context(self._surroundings.disk.read_only())
        elif kind == "descriptors":
            for process in processes:
                held.enter_context(used_up(process.pid, num_left=2))
        else:
            for clock in self._clocks(victim):
                clock.jump(hours)
                held.callback(clock.jump, -hours)

    def _clocks(self, victim: str) -> list[WallClock]:
        clocks = self._surroundings.clocks
        return list(clocks.values()) if victim == FLEET else [clocks[victim]]

    async def _fill(self, seconds: float) -> None:
        assert self._surroundings.disk is not None, "one of `kinds`"
        until = time.monotonic() + seconds
        held = ExitStack()
        fill = held.enter_context(self._surroundings.disk.filled())
        try:
            while time.monotonic() < until:
                await _to_the_end(fill)
                await asyncio.sleep(_REFILL_SECONDS)
        finally:
            await _to_the_end(held.close)


async def _to_the_end(work: Callable[[], None]) -> None:
    """Work in a thread, and wait for its end also when cancelled: what undoes a fault comes after it."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.gather(task, return_exceptions=True)
