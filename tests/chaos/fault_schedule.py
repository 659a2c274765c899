"""Plans the faults of a run: which fault, when, and on which process.

    kill           -9: the whole service, a worker's front alone, or its engine alone; started again at once
    restart        SIGTERM: it drains and ends by itself; started again then
    stop           SIGSTOP, SIGCONT once its leases have run out: the whole worker, its engine alone, or a KV service

A service is eligible once it has been up for some seconds since its last fault. A worker or KV service is stopped only
while the other one of its role is up: requests wait for a restarted service, not for a stopped one. Both may be killed
at once, unless `Options.spares_one` is set.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from tests.chaos.options import Options
from tests.system.fleet import START_SECONDS, Fleet, Service, until

Kind = Literal["kill", "kill front", "kill engine", "restart", "stop", "stop engine", "stop kv"]
_WEIGHTS: dict[Kind, int] = {
    "kill": 4,
    "kill front": 2,
    "kill engine": 2,
    "restart": 3,
    "stop": 2,
    "stop engine": 2,
    "stop kv": 1,
}
_DRAIN_SECONDS = 150.0


@dataclass(eq=False)
class Fault:
    """One fault of one service; `at` and `over` are seconds since the start of the schedule."""

    at: float
    kind: Kind
    worker_id: str
    over: float | None = None

    def __str__(self) -> str:
        end = "under way" if self.over is None else f"up again at {self.over:.1f} s"
        return f"{self.at:6.1f} s  {self.kind:<12} {self.worker_id:<10} {end}"


class FaultSchedule:
    """Injects one fault after the other, and restarts the services like a supervisor."""

    def __init__(
        self,
        fleet: Fleet,
        start: Callable[[str], Service],
        rng: random.Random,
        options: Options,
    ) -> None:
        self.faults: list[Fault] = []
        self._fleet = fleet
        self._start = start
        self._rng = rng
        self._options = options
        self._began = time.monotonic()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._seen_up: dict[str, float] = {}
        """When a service was last up or had a fault under way, by `time.monotonic`."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Inject faults until `is_over()`; then wait until all services are up. Raises the failure of a service."""
        self._began = time.monotonic()
        while not is_over():
            await asyncio.sleep(self._rng.uniform(*self._options.pause_seconds))
            self._inject()
            self._raise_failures()
        await asyncio.gather(*self._under_way.values())
        await self._fleet.ready()

    async def end(self) -> None:
        """Cancel running faults after a run that was cut short; stopped processes are resumed."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the schedule."""
        return time.monotonic() - self._began

    def _inject(self) -> None:
        """Pick a random fault and an eligible service."""
        [kind] = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        seconds = self._rng.uniform(*self._options.stop_seconds)
        victims = [worker_id for worker_id in sorted(self._fleet.services) if self._is_eligible(worker_id, kind)]
        if not victims:
            return
        fault = Fault(self.seconds, kind, self._rng.choice(victims))
        self.faults.append(fault)
        self._under_way[fault.worker_id] = asyncio.create_task(self._carry_out(fault, seconds))

    def _is_eligible(self, worker_id: str, kind: Kind) -> bool:
        role = self._fleet.services[worker_id].role
        if kind in ("stop engine", "stop", "stop kv") and (role == "kv") != (kind == "stop kv"):
            return False  # a KV service has no engine, and a stop of its own
        others = [other for other, service in self._fleet.services.items() if service.role == role]
        must_be_up = others if kind.startswith("stop") or self._options.spares_one else [worker_id]
        return all(map(self._is_up, must_be_up)) and self._is_past_rest(worker_id)

    def _is_up(self, worker_id: str) -> bool:
        task, worker = self._under_way.get(worker_id), self._fleet.worker(worker_id)
        return (task is None or task.done()) and worker is not None and worker.is_usable

    def _is_past_rest(self, worker_id: str) -> bool:
        ends = [fault.over or 0.0 for fault in self.faults if fault.worker_id == worker_id]
        return not ends or self.seconds - ends[-1] > self._options.rest_seconds

    def _raise_failures(self) -> None:
        for task in self._under_way.values():
            if task.done():
                task.result()
        for worker_id, service in self._fleet.services.items():
            now, fault = time.monotonic(), self._under_way.get(worker_id)
            if self._is_up(worker_id) or (fault is not None and not fault.done()):
                self._seen_up[worker_id] = now
            seconds = now - self._seen_up.setdefault(worker_id, now)
            assert seconds < START_SECONDS, (
                f"{worker_id} has not been up for {seconds:.0f} s, though nothing was done to it:\n{service.tail()}"
            )

    async def _carry_out(self, fault: Fault, seconds: float) -> None:
        service = self._fleet.services[fault.worker_id]
        before = self._incarnation(fault.worker_id)
        engines = psutil.Process(service.process.pid).children()
        stops = fault.kind.startswith("stop")
        if stops:
            front = [] if fault.kind == "stop engine" else [psutil.Process(service.process.pid)]
            await self._stop([*front, *engines], seconds)
        else:
            await self._end(fault, service, engines)
            self._start(fault.worker_id)
        await self._until_up(fault.worker_id, None if stops else before)
        fault.over = self.seconds

    async def _end(self, fault: Fault, service: Service, engines: Sequence[psutil.Process]) -> None:
        """Kill a service, or its front or engine, or send SIGTERM; return once all its processes have ended."""
        if fault.kind in ("kill", "kill engine"):
            for engine in engines:
                engine.kill()
        if fault.kind == "restart":
            service.kill(signal.SIGTERM)
        elif fault.kind != "kill engine" or not engines:
            service.kill()
        code = await self._fleet.ended(service, _DRAIN_SECONDS)
        assert fault.kind != "restart" or code == 0, f"{fault.worker_id} ended with {code}:\n{service.tail()}"
        await until(lambda: not any(map(_runs, engines)), 10, lambda: f"the engine of {fault.worker_id} goes on")

    async def _stop(self, processes: Sequence[psutil.Process], seconds: float) -> None:
        for process in processes:
            process.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            for process in processes:
                process.resume()

    async def _until_up(self, worker_id: str, before: str | None) -> None:
        """Wait until the control plane has inner of a service since now, of another life of it than `before`."""
        service, since = self._fleet.services[worker_id], time.monotonic()

        def is_up() -> bool:
            assert service.process.poll() is None, f"{worker_id} ended by itself:\n{service.tail()}"
            worker = self._fleet.worker(worker_id)
            has_beaten = worker is not None and worker.is_usable and worker.last_heartbeat > since
            return has_beaten and self._incarnation(worker_id) != before

        await until(is_up, START_SECONDS, lambda: f"{worker_id} did not come up:\n{service.tail()}")

    def _incarnation(self, worker_id: str) -> str:
        worker = self._fleet.worker(worker_id)
        return worker.incarnation if worker is not None else ""


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
