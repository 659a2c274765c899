"""Replaces workers one by one, new ones first, and takes everything back if a new one cannot serve.

    for each worker:  start the new one -> it is proven -> drain the old one -> stop it
                             |                 |                |
                             +--- it fails ----+----------------+--> take back:
                                  stop the new one; the old one takes requests again;
                                  of workers replaced before: start the old one, prove it, drain and stop the new one

A worker is proven when the gateway has sent a request through it that came back whole (POST /v1/workers/{id}/probe).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem_client.cli.fleet import FleetMember
from tandem_client.cli.plan import ProcessSpec
from tandem_client.cli.process_memory import available_bytes, used_bytes
from tandem_client.cli.supervisor import Child, Supervisor

_POLL_SECONDS = 0.2
_MAX_FAILED_PROBES = 5
"""In a row, one second apart, of a worker that is ready."""
_PROBE_AGAIN_SECONDS = 1.0
_STOP_SECONDS = 10.0
"""For a worker without requests to end."""
_MOVE_SECONDS = 1.0
"""For a worker whose requests did not end within the time to drain: the gateway moves them once it is gone."""
_GIB = 1 << 30

Tell = Callable[[str, str], None]
"""Called with a process's name, or "", and one line about what happens."""


class RollFailed(Exception):
    """A step failed; the message says why and what to do."""


class Fleet(Protocol):
    """What a roll needs of the gateway."""

    async def members(self) -> list[FleetMember]:
        """Return the workers that are registered; [] while the gateway does not answer."""

    async def probe(self, worker_id: str) -> str:
        """Send a request through a worker; return why it did not come back whole, "" if it did."""

    async def drain(self, worker_id: str, *, resume: bool = False) -> None:
        """Drain or resume a worker. Raise RollFailed if it cannot be asked."""

    async def report(self, state: str, **facts: object) -> None:
        """Tell the fleet's events; a failure is no failure of the roll."""


@dataclass(frozen=True)
class RollStep:
    """One worker to replace."""

    old: str
    """Its name."""
    new: ProcessSpec


@dataclass(frozen=True)
class RollOptions:
    drain_seconds: float = 120.0
    """For the requests of an old worker to end; what is left then is moved to other workers."""
    start_seconds: float = 600.0
    """For a new worker to load its model and to be proven."""


@dataclass
class Roll:
    """One replacement of workers, on the supervisor's event loop. `run` is called once."""

    supervisor: Supervisor
    fleet: Fleet
    steps: Sequence[RollStep]
    options: RollOptions
    tell: Tell
    available_bytes: Callable[[], int] = available_bytes
    _cancelled: str = ""
    _replaced: list[tuple[ProcessSpec, Child]] = field(default_factory=list)
    """Old worker and new process of the steps that are done."""

    def cancel(self, why: str) -> None:
        """Let the roll fail at its next look, and take everything back."""
        self._cancelled = self._cancelled or why

    async def run(self) -> str:
        """Replace all workers; return "" or why everything was taken back."""
        await self.fleet.report("started", num_workers=len(self.steps))
        try:
            for number, step in enumerate(self.steps, 1):
                await self._replace(self._child(step.old), step.new, self._check_roll)
                await self.fleet.report("step", worker=step.old, to=step.new.name, num_workers=number)
        except RollFailed as failure:
            self.tell("", f"taking everything back: {failure}")
            problems = await self._take_back()
            why = ". ".join([str(failure), *problems])
            await self.fleet.report("rolled_back", reason=why[:1000])
            return why
        await self.fleet.report("finished", num_workers=len(self.steps))
        return ""

    # ------------------------------------------------------------------------------------------------------- one step

    async def _replace(self, old: Child, spec: ProcessSpec, check: Callable[[], None]) -> None:
        """Put a new process in the place of an old one. If this raises RollFailed, the old one serves as before."""
        check()
        self._check_memory(old)
        new = self.supervisor.add(spec)
        drained = False
        try:
            await self._proven(new, check)
            member = await self._member(old.spec.name)
            if member is not None:
                drained = True
                await self._drained(member, old, new, check)
        except RollFailed:
            await self.supervisor.retire(new, _STOP_SECONDS)
            if drained:
                await self._resume(old)
            raise
        self.supervisor.keep(new)
        await self._stop(old)
        self._replaced.append((old.spec, new))

    async def _proven(self, new: Child, check: Callable[[], None]) -> None:
        """Wait until the worker is ready and a probe has gone through it."""
        name, deadline = new.spec.name, time.monotonic() + self.options.start_seconds
        stage, reason, num_failed = "", "it has not registered", 0
        while True:
            check()
            _check_alive(new)
            member = await self._member(name)
            if member is not None:
                reason = f"it is {member.state}{member.error and f': {member.error}'}"
                if member.state == "failed":
                    raise RollFailed(f"{name} failed: {member.error}; see `tandem logs {name}`")
                now = (member.load_stage or member.state).replace("_", " ") if member.state != "ready" else "ready"
                if now != stage:
                    stage = now
                    self.tell(name, now)
            if member is not None and member.state == "ready":
                if not (reason := await self.fleet.probe(member.id)):
                    self.tell(name, "proven: a request has gone the whole way through it")
                    return
                num_failed += 1
                if num_failed >= _MAX_FAILED_PROBES:
                    raise RollFailed(f"{name} is ready, but {num_failed} probes in a row failed: {reason}")
                await self._pause(new, _PROBE_AGAIN_SECONDS)
                continue
            if time.monotonic() > deadline:
                raise RollFailed(
                    f"{name} was not proven within {self.options.start_seconds:g} s: {reason}; a model that takes "
                    "longer to load needs a larger --start-seconds"
                )
            await self._pause(new, _POLL_SECONDS)

    async def _drained(self, member: FleetMember, old: Child, new: Child, check: Callable[[], None]) -> None:
        """Drain the old worker, and wait until its requests have ended, or the time for that has passed."""
        name = old.spec.name
        await self.fleet.drain(member.id)
        self.tell(name, f"drains: its requests may end within {self.options.drain_seconds:g} s")
        deadline = time.monotonic() + self.options.drain_seconds
        while time.monotonic() < deadline:
            check()
            _check_alive(new)
            found = await self._member(name)
            if found is None or (found.state == "draining" and not found.num_running + found.num_waiting):
                return
            await self._pause(new, _POLL_SECONDS)

    async def _stop(self, old: Child) -> None:
        member = await self._member(old.spec.name)
        num_left = member.num_running + member.num_waiting if member else 0
        if num_left:
            self.tell(old.spec.name, f"{num_left} requests did not end in time, and go on at other workers")
        await self.supervisor.retire(old, _MOVE_SECONDS if num_left else _STOP_SECONDS)
        self.tell(old.spec.name, "stopped")

    # ------------------------------------------------------------------------------------------------------ taking back

    async def _resume(self, old: Child) -> None:
        """Let a drained worker take requests again; if it cannot be asked, it is started again."""
        member = await self._member(old.spec.name)
        try:
            if member is not None:
                await self.fleet.drain(member.id, resume=True)
                self.tell(old.spec.name, "takes requests again")
        except RollFailed as failure:
            self.tell(old.spec.name, f"cannot be resumed, and is started again: {failure}")
            old.kill()

    async def _take_back(self) -> list[str]:
        """Start the old workers again, the last one replaced first; return what could not be taken back."""
        problems: list[str] = []
        for spec, new in reversed(self._replaced[:]):
            again = replace(spec, name=(name := self._free_name(spec.name)), command=renamed(spec.command, name))
            try:
                await self._replace(new, again, lambda: None)
            except RollFailed as failure:
                problems.append(f"{new.spec.name} stays, because the old worker did not come back: {failure}")
        return problems

    def _free_name(self, name: str) -> str:
        return next_name(name, {child.spec.name for child in self.supervisor.children})

    # ---------------------------------------------------------------------------------------------------------- looking

    def _child(self, name: str) -> Child:
        found = next((child for child in self.supervisor.children if child.spec.name == name), None)
        if found is None:
            raise RollFailed(f"there is no worker {name} any more; see `tandem status`")
        return found

    async def _member(self, name: str) -> FleetMember | None:
        """Return the worker of this name as the gateway sees it; the one that is not gone, if there are two."""
        found = [each for each in await self.fleet.members() if each.name == name]
        return min(found, key=lambda each: (each.suspected, each.heartbeat_age_seconds), default=None)

    async def _pause(self, new: Child, seconds: float) -> None:
        """Wait, or until the new process ends."""
        try:
            await asyncio.wait_for(new.end.wait(), seconds)
        except TimeoutError:
            return

    def _check_roll(self) -> None:
        if self._cancelled:
            raise RollFailed(self._cancelled)

    def _check_memory(self, old: Child) -> None:
        """Raise RollFailed if there is no room for a second worker like this one."""
        if self.supervisor.is_stopping:
            raise RollFailed("`tandem up` is being stopped")
        needed, available = used_bytes(old.process.pid) if old.process else 0, self.available_bytes()
        if needed > available:
            raise RollFailed(
                f"a second worker beside {old.spec.name} needs about {needed / _GIB:.1f} GiB, and "
                f"{available / _GIB:.1f} GiB are available; free memory, give the workers less KV memory, or stop "
                "`tandem up` and start the new release in its place"
            )


def _check_alive(new: Child) -> None:
    if new.end.is_set():
        raise RollFailed(f"{new.spec.name} {new.ended_because}")


def next_name(name: str, taken: set[str]) -> str:
    """Return the name of the worker that replaces `name`: decode-0, decode-0-v2, decode-0-v3, ..."""
    base, dash, number = name.rpartition("-v")
    if not dash or not number.isdecimal():
        base, number = name, "1"
    version = int(number) + 1
    while f"{base}-v{version}" in taken:
        version += 1
    return f"{base}-v{version}"


def renamed(command: Sequence[str], name: str) -> tuple[str, ...]:
    """Return a worker's command with another --worker-id."""
    return with_flag(command, "--worker-id", name)


def with_flag(command: Sequence[str], flag: str, value: str) -> tuple[str, ...]:
    """Return a command with a value for a flag, in place of its earlier value if it has one."""
    if flag not in command:
        return (*command, flag, value)
    place = command.index(flag) + 1
    return (*command[:place], value, *command[place + 1 :])
