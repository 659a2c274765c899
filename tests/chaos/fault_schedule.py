"""Plans the faults of a run: which fault, when, and on which process.

    kill           -9: the whole service, a worker's front alone, or its engine alone; started again at once
    restart        SIGTERM: it drains and ends by itself; started again then
    stop           SIGSTOP, SIGCONT once its leases have run out: the whole worker, its engine alone, or a KV service
    the others     of the machine under the processes: `tests.chaos.machine_faults`; the first of each in any order

A service is eligible once it has been up for some seconds since its last fault. A worker or KV service is stopped, or
loses its clock or its descriptors, only while the other one of its role is up: requests wait for a restarted service,
not for one that does not answer. Both may be killed at once, unless `Options.spares_one` is set or they encode: a
gateway that starts while a model has no worker at all does not know the model. Faults of the whole fleet meet whatever
else is under way, but not one another.
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

from tests.chaos.machine_faults import FLEET, MACHINE_KINDS, MachineFaults, MachineKind
from tests.chaos.options import Options
from tests.chaos.priorities import raise_priority
from tests.system.fleet import START_SECONDS, Fleet, Service, until

ProcessKind = Literal["kill", "kill front", "kill engine", "restart", "stop", "stop engine", "stop kv"]
GatewayKind = Literal["kill gateway", "drain gateway", "stop gateway"]
"""Of the second gateway: `tests.chaos.gateway_faults`."""
Kind = ProcessKind | MachineKind | GatewayKind
_WEIGHTS: dict[Kind, int] = {
    "kill": 4,
    "kill front": 2,
    "kill engine": 2,
    "restart": 3,
    "stop": 2,
    "stop engine": 2,
    "stop kv": 1,
}
_WEIGHT_OF_MACHINE = 2
_DRAIN_SECONDS = 150.0
_LATE_SECONDS = 2.0
"""So much later a request may be refused for a database that could not be written: the gateway asks it again then."""


@dataclass(eq=False)
class Fault:
    """One fault of one process, or of FLEET; `at` and `over` are seconds since the start of the schedule."""

    at: float
    kind: Kind
    victim: str
    hours: int = 0
    """Of a clock: ahead, or back below 0."""
    over: float | None = None

    def __str__(self) -> str:
        end = "under way" if self.over is None else f"up again at {self.over:.1f} s"
        kind = f"{self.kind} {self.hours:+d} h" if self.hours else self.kind
        return f"{self.at:6.1f} s  {kind:<13} {self.victim:<10} {end}"


class FaultSchedule:
    """Injects one fault after the other, and restarts the services like a supervisor."""

    def __init__(
        self,
        fleet: Fleet,
        start: Callable[[str], Service],
        machine: MachineFaults,
        rng: random.Random,
        options: Options,
    ) -> None:
        self.faults: list[Fault] = []
        self._fleet = fleet
        self._start = start
        self._machine = machine
        self._rng = rng
        self._to_come: list[Kind] = list(rng.sample(machine.kinds, len(machine.kinds)))
        """Faults of the machine that have not been yet: each comes once at least."""
        self._weights: dict[Kind, int] = {**_WEIGHTS, **dict.fromkeys(machine.kinds, _WEIGHT_OF_MACHINE)}
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

    @property
    def has_more(self) -> bool:
        """Whether a fault has not been yet that each run has."""
        return bool(self._to_come)

    def was_disk_broken(self, since: float) -> bool:
        """Return whether the disk was full or read-only since a time of `time.monotonic`, or a moment before."""
        ends = [fault.over for fault in self.faults if fault.kind in ("disk full", "read-only")]
        return any(end is None or since - self._began < end + _LATE_SECONDS for end in ends)

    def _inject(self) -> None:
        """Pick a random fault and an eligible victim; every other time one of those that have not been yet."""
        if self._to_come and self._rng.random() < 0.5:
            kind = self._to_come[0]
        else:
            [kind] = self._rng.choices(list(self._weights), list(self._weights.values()))
        is_of_fleet = kind in MACHINE_KINDS and self._machine.victims(kind, ()) == [FLEET]
        seconds = self._rng.uniform(*(self._options.fleet_seconds if is_of_fleet else self._options.stop_seconds))
        victims = [victim for victim in self._victims(kind) if self._is_eligible(victim, kind)]
        if not victims:
            return
        hours = self._rng.choice((-1, 1)) if kind.startswith("clock") else 0
        fault = Fault(self.seconds, kind, self._rng.choice(victims), hours)
        self._to_come = [other for other in self._to_come if other != kind]
        self.faults.append(fault)
        self._under_way[fault.victim] = asyncio.create_task(self._carry_out(fault, seconds))

    def _victims(self, kind: Kind) -> Sequence[str]:
        services = sorted(self._fleet.services)
        return self._machine.victims(kind, services) if kind in MACHINE_KINDS else services

    def _is_eligible(self, victim: str, kind: Kind) -> bool:
        if victim not in self._fleet.services:
            return self._is_over(victim) and self._is_past_rest(victim)
        role = self._fleet.services[victim].role
        if kind in ("stop engine", "stop", "stop kv") and (role == "kv") != (kind == "stop kv"):
            return False  # a KV service has no engine, and a stop of its own
        others = [other for other, service in self._fleet.services.items() if service.role == role]
        needs_others = kind.startswith("stop") or kind in MACHINE_KINDS or self._options.spares_one or role == "encode"
        return all(map(self._is_up, others if needs_others else [victim])) and self._is_past_rest(victim)

    def _is_over(self, victim: str) -> bool:
        task = self._under_way.get(victim)
        return task is None or task.done()

    def _is_up(self, worker_id: str) -> bool:
        worker = self._fleet.worker(worker_id)
        return self._is_over(worker_id) and worker is not None and worker.is_usable

    def _is_past_rest(self, victim: str) -> bool:
        ends = [fault.over or 0.0 for fault in self.faults if fault.victim == victim]
        return not ends or self.seconds - ends[-1] > self._options.rest_seconds

    def _raise_failures(self) -> None:
        for task in self._under_way.values():
            if task.done():
                task.result()
        for worker_id, service in self._fleet.services.items():
            now = time.monotonic()
            if self._is_up(worker_id) or not self._is_over(worker_id):
                self._seen_up[worker_id] = now
            seconds = now - self._seen_up.setdefault(worker_id, now)
            assert seconds < START_SECONDS, (
                f"{worker_id} has not been up for {seconds:.0f} s, though nothing was done to it:\n{service.tail()}"
            )

    async def _carry_out(self, fault: Fault, seconds: float) -> None:
        if fault.victim not in self._fleet.services:
            assert fault.kind in MACHINE_KINDS, "the control plane is not killed"
            await self._machine.hold(fault.kind, fault.victim, (), fault.hours, seconds)
            await self._until_all_up()
        else:
            await self._carry_out_on_service(fault, seconds)
        fault.over = self.seconds

    async def _carry_out_on_service(self, fault: Fault, seconds: float) -> None:
        service = self._fleet.services[fault.victim]
        before = self._incarnation(fault.victim)
        front = psutil.Process(service.process.pid)
        engines = front.children()
        if fault.kind in MACHINE_KINDS:
            processes = [self._rng.choice([front, *engines])] if fault.kind == "descriptors" else []
            await self._machine.hold(fault.kind, fault.victim, processes, fault.hours, seconds)
            await self._until_up(fault.victim, None)
        elif fault.kind.startswith("stop"):
            await self._stop(engines if fault.kind == "stop engine" else [front, *engines], seconds)
            await self._until_up(fault.victim, None)
        else:
            await self._end(fault, service, engines)
            started = self._start(fault.victim)
            await self._until_up(fault.victim, before)
            raise_priority(psutil.Process(started.process.pid))

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
        assert fault.kind != "restart" or code == 0, f"{fault.victim} ended with {code}:\n{service.tail()}"
        await until(lambda: not any(map(_runs, engines)), 10, lambda: f"the engine of {fault.victim} goes on")

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

    async def _until_all_up(self) -> None:
        """Wait until every service that has no fault of its own has sent a heartbeat since now."""
        since = time.monotonic()

        def has_beaten(worker_id: str) -> bool:
            worker = self._fleet.worker(worker_id)
            return worker is not None and worker.is_usable and worker.last_heartbeat > since

        def behind() -> list[str]:
            return [each for each in self._fleet.services if self._is_over(each) and not has_beaten(each)]

        await until(lambda: not behind(), START_SECONDS, lambda: f"not up: {self._fleet.tails(behind())}")

    def _incarnation(self, worker_id: str) -> str:
        worker = self._fleet.worker(worker_id)
        return worker.incarnation if worker is not None else ""


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
