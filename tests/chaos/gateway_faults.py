"""Ends and stops the second gateway while its clients' streams run.

kill gateway    -9: each of its streams ends with an error at once; then it is started again
drain gateway   SIGTERM: its streams end by themselves, it ends with 0; then it is started again
stop gateway    SIGSTOP, SIGCONT once its leases and heartbeats are late: its streams go on
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import get_args

import psutil

from tests.chaos.fault_schedule import Fault, GatewayKind
from tests.chaos.options import Options
from tests.chaos.second_gateway import SecondGateway
from tests.system.fleet import START_SECONDS, until

KINDS: tuple[GatewayKind, ...] = get_args(GatewayKind)
_DRAIN_SECONDS = 150.0
_ERROR_SECONDS = 20.0
"""So long, at most, until all clients of a gateway that has ended know it, on a busy machine."""


class GatewayFaults:
    """One fault after the other; so many kinds as the options say once at least, in any order."""

    def __init__(
        self, gateway: SecondGateway, seconds: Callable[[], float], rng: random.Random, options: Options
    ) -> None:
        """`seconds`: since the start of the schedule of all faults."""
        self.faults: list[Fault] = []
        self.num_met = Counter[GatewayKind]()
        """Streams with tokens that each kind of fault has met."""
        self._gateway = gateway
        self._seconds = seconds
        self._rng = rng
        self._to_come = rng.sample(KINDS, options.num_gateway_kinds)
        self._options = options

    @property
    def has_more(self) -> bool:
        """Whether a fault has not been yet that each run has."""
        return bool(self._to_come)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Inject faults until `is_over()`, and leave the gateway ready. Raises what must not be."""
        while not is_over():
            await asyncio.sleep(self._rng.uniform(*self._options.pause_seconds))
            kind = self._to_come[-1] if self._to_come else self._rng.choice(KINDS)
            if not await self._is_streaming(is_over):
                return
            self._to_come = self._to_come[:-1]
            fault = Fault(self._seconds(), kind, self._gateway.name)
            self.faults.append(fault)
            self.num_met[kind] += self._num_streaming()
            await self._carry_out(kind)
            fault.over = self._seconds()

    async def _carry_out(self, kind: GatewayKind) -> None:
        if kind == "stop gateway":
            await self._stop(self._rng.uniform(*self._options.stop_seconds))
        elif kind == "kill gateway":
            await self._kill()
        else:
            await self._gateway.drain(_DRAIN_SECONDS)
            await self._until_all_ended("a gateway that has drained")
        if kind != "stop gateway":
            self._gateway.start_again()
        await self._gateway.ready()

    async def _kill(self) -> None:
        children = self._gateway.process.children(recursive=True)
        await self._gateway.kill()
        await self._until_all_ended("a killed gateway")
        await until(lambda: not any(map(_runs, children)), _ERROR_SECONDS, lambda: f"{children} go on")

    async def _stop(self, seconds: float) -> None:
        process = self._gateway.process
        process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            process.resume()

    def _num_streaming(self) -> int:
        return sum(call.has_tokens for call in self._gateway.calls)

    async def _is_streaming(self, is_over: Callable[[], bool]) -> bool:
        """Wait until an answer streams; return False if the run is over before."""
        await until(
            lambda: self._num_streaming() > 0 or is_over(),
            START_SECONDS,
            lambda: f"{self._gateway.name} has no streams:\n{self._gateway.tail()}",
        )
        return self._num_streaming() > 0

    async def _until_all_ended(self, what: str) -> None:
        """Wait until all requests of this life have their end or their error: before the next life begins."""
        life = self._gateway.life

        def left() -> list[object]:
            return [call for call in self._gateway.calls if call.life == life]

        await until(lambda: not left(), _ERROR_SECONDS, lambda: f"clients wait for {what}: {left()}")


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
