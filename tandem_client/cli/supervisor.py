"""Keeps child processes running, and stops them in order.

    starting -> running -> died -> (back-off) -> running ...
                              \\-> gave up   after MAX_QUICK_DEATHS quick deaths in a row
                              \\-> refused   exit code 78 or 2: a wrong model or setting stays wrong, a worker revoked

    on trial -> running       a process that `add` has started, once `keep` is called
        \\-> ended            it is not started again, and ends nothing else

`Supervisor.run` returns 0 after `stop`, and 1 when a process refuses or the last process of a role gives up. The
gateway ends first, when its streams have ended, then the workers, then the KV service: SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_client.cli.bounded_log import MAX_LOG_BYTES, bound_log
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.plan import DRAIN_SECONDS, GATEWAY_STOP_SECONDS, ProcessSpec, gateway_drain_seconds

REFUSALS = frozenset({2, 78})
"""Exit codes that a restart cannot change: wrong flags (2), a refused model, a revoked worker (78, EX_CONFIG)."""

_NUM_LAST_LINES = 20


Announce = Callable[[str, str], None]
"""Called with a process's name and one line about its end."""


class Supervisor:
    """Starts processes, restarts those that die, and stops them in order."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_folder: Path,
        announce: Announce,
        policy: RestartPolicy | None = None,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        """A log of more than `max_log_bytes` is moved to NAME.log.1; the log before that is deleted."""
        self._max_log_bytes = max_log_bytes
        self._log_folder = log_folder
        self.children = [self._new_child(spec) for spec in specs]
        self._keepers: dict[Child, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None
        """Has the exception of a keeper: a programming error."""
        self._announce = announce
        self._policy = policy or RestartPolicy()
        self._stop = asyncio.Event()
        self._on_stop: list[Callable[[], object]] = []
        self._exit_code = 0

    def stop(self) -> None:
        """Let `run` drain and return; a second call kills at once. May be called from a loop's signal handler."""
        if self._stop.is_set():
            for child in self.children:
                child.kill()
        self._begin_stop()

    @property
    def specs(self) -> list[ProcessSpec]:
        """The processes that are kept running."""
        return [child.spec for child in self.children if not child.gave_up]

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call `callback` when stopping begins, before the next announcement."""
        self._on_stop.append(callback)

    async def run(self) -> int:
        """Keep all processes running until `stop`; return the exit code of the command."""
        self._failed = asyncio.get_running_loop().create_future()
        for child in self.children:
            self._begin_keeping(child)
        stopped = asyncio.create_task(self._stop.wait())
        bounding = asyncio.create_task(self._bound_logs())
        try:
            waiting: set[asyncio.Future[object]] = {stopped, bounding, self._failed}  # type: ignore[arg-type]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            tasks = [stopped, bounding, *self._keepers.values()]
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()
        return self._exit_code

    # --------------------------------------------------------------------------------------------- replacing processes

    def add(self, spec: ProcessSpec) -> Child:
        """Start one more process, on trial: if it ends, it is not started again, and nothing else ends."""
        assert not self.is_stopping, "nothing is started while all is stopped"
        child = self._new_child(spec)
        child.is_on_trial = True
        self.children.append(child)
        self._begin_keeping(child)
        return child

    def keep(self, child: Child) -> None:
        """End the trial of a process: it is kept running like the others."""
        child.is_on_trial = False

    async def retire(self, child: Child, drain_seconds: float) -> bool:
        """Stop one process for good; return False if it had to be killed."""
        keeper = self._keepers.pop(child)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        was_clean = await child.stop(drain_seconds)
        self.children.remove(child)  # last: if this is cancelled, the process ends with all others
        return was_clean

    def _new_child(self, spec: ProcessSpec) -> Child:
        return Child(spec, self._log_folder / f"{spec.name}.log")

    def _begin_keeping(self, child: Child) -> None:
        keeper = asyncio.create_task(self._keep(child))
        keeper.add_done_callback(self._keeper_ended)
        self._keepers[child] = keeper

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    # ----------------------------------------------------------------------------------------------- keeping processes

    async def _keep(self, child: Child) -> None:
        """Return once the process is not to be started again."""
        while True:
            try:
                await child.start()
            except OSError as error:
                if not child.is_on_trial:
                    raise
                child.end_trial(f"cannot be started: {error}")
                return
            code = await child.wait(self._policy)
            if child.is_on_trial:
                child.end_trial(f"{describe_exit(code)}{_why(child)}")
                return
            if code in REFUSALS:
                self._refused(child)
                return
            if child.num_quick_deaths >= self._policy.max_quick_deaths:
                self._give_up(child, code)
                return
            delay = self._policy.delay_seconds(child.num_quick_deaths)
            self._announce(child.spec.name, f"{describe_exit(code)}; starting again in {delay:g} s{_tail(child)}")
            await asyncio.sleep(delay)

    async def _bound_logs(self) -> None:
        failed: set[str] = set()
        while True:
            await asyncio.sleep(self._policy.log_check_seconds)
            for child in self.children:
                try:
                    await asyncio.to_thread(bound_log, child.log_path, self._max_log_bytes)
                except OSError as error:  # such as a full disk: the processes go on
                    if child.spec.name not in failed:
                        self._announce(child.spec.name, f"its log cannot be bounded: {error}")
                    failed.add(child.spec.name)

    def _refused(self, child: Child) -> None:
        """End all, unless the process ran before, such as a revoked worker, and another one has its role."""
        child.gave_up = True
        if child.has_run and self._others(child):
            why = f"refuses to go on: {_last_words(child)}; going on without it"
            self._announce(child.spec.name, f"{why}\n    log: {child.log_path}")
        else:
            self._fail(child, f"refused to start: {_last_words(child)}\n    log: {child.log_path}")

    def _others(self, child: Child) -> list[Child]:
        return [other for other in self.children if other.spec.role == child.spec.role and not other.gave_up]

    def _give_up(self, child: Child, code: int) -> None:
        child.gave_up = True
        what = f"{describe_exit(code)}, {child.num_quick_deaths} times in a row; not starting it again"
        if self._others(child):
            self._announce(child.spec.name, f"{what}; going on without it{_tail(child)}")
        else:
            self._fail(child, f"{what}{_tail(child)}")

    def _fail(self, child: Child, why: str) -> None:
        self._exit_code = 1
        self._begin_stop()
        self._announce(child.spec.name, why)

    def _begin_stop(self) -> None:
        self._stop.set()
        while self._on_stop:
            self._on_stop.pop()()

    async def _stop_all(self) -> None:
        """Stop the gateway, then workers, then the KV service, so that running requests can finish."""
        policy = self._policy
        for stage, seconds in (
            (("control",), policy.gateway_drain_seconds),
            (("prefill", "decode", "encode"), policy.drain_seconds),
            (("kv",), policy.drain_seconds),
        ):
            stage_children = [child for child in self.children if child.spec.role in stage]
            drained = await asyncio.gather(*(child.stop(seconds) for child in stage_children))
            for child, clean in zip(stage_children, drained, strict=True):
                if not clean:
                    self._announce(child.spec.name, "did not drain in time and was killed")


def _last_words(child: Child) -> str:
    """Return the last line of a log that is no routine one; what a process logs while it drains comes after it."""
    lines = last_lines(child.log_path, _NUM_LAST_LINES)
    return next((readable(line) for line in reversed(troubles(lines) or lines)), "its log is empty")


def _why(child: Child) -> str:
    lines = last_lines(child.log_path, _NUM_LAST_LINES)
    return f": {_last_words(child)} (log: {child.log_path})" if lines else f" (log: {child.log_path})"


def _tail(child: Child) -> str:
    lines = [readable(line) for line in troubles(last_lines(child.log_path, 5))]
    return "".join(f"\n    {line}" for line in [*lines, f"log: {child.log_path}"])


@dataclass(frozen=True)
class RestartPolicy:
    """When a process that died is restarted."""

    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 10.0
    quick_death_seconds: float = 10.0
    max_quick_deaths: int = 5
    drain_seconds: float = DRAIN_SECONDS
    gateway_drain_seconds: float = gateway_drain_seconds({}) + GATEWAY_STOP_SECONDS
    """For the requests that run, and for what the gateway writes after them."""
    log_check_seconds: float = 5.0

    def delay_seconds(self, num_quick_deaths: int) -> float:
        return min(self.max_delay_seconds, float(self.first_delay_seconds * 2 ** max(0, num_quick_deaths - 1)))


class Child:
    """One process and its restarts, with one log."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.num_quick_deaths = 0
        self.has_run = False
        """Whether it was alive for longer than a quick death takes."""
        self.gave_up = False
        self.is_on_trial = False
        self.end = asyncio.Event()
        """Set when the process has ended while it was on trial."""
        self.ended_because = ""
        self.process: asyncio.subprocess.Process | None = None
        self._started = 0.0

    async def start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C in a terminal does not reach it."""
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *die_with_parent(self.spec.command),
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self.spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.spec.folder or None,
            )
        self._started = time.monotonic()

    async def wait(self, policy: RestartPolicy) -> int:
        """Wait for the process's end and return the exit code; count quick deaths in a row."""
        assert self.process is not None, "start comes before wait"
        code = await self.process.wait()
        self._signal_group(signal.SIGKILL)  # an engine process that is left would keep cores and memory
        lived_seconds = time.monotonic() - self._started
        is_quick = lived_seconds < policy.quick_death_seconds
        self.num_quick_deaths = self.num_quick_deaths + 1 if is_quick else 0
        self.has_run = self.has_run or not is_quick
        return code

    def end_trial(self, because: str) -> None:
        """Note why the process has ended; it is not started again."""
        self.gave_up = True
        self.ended_because = because
        self.end.set()

    async def stop(self, drain_seconds: float) -> bool:
        """Drain the process; return False if it had to be killed."""
        if not self._is_running():
            return True
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), drain_seconds)
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            await self.process.wait()
            return False
        self._signal_group(signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._is_running():
            self._signal_group(signal.SIGKILL)

    def _is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left; macOS reports EPERM
            os.killpg(self.process.pid, number)


def describe_exit(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a log; [] if there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def troubles(lines: Sequence[str]) -> list[str]:
    """Return the warnings, the errors, and lines in another format, such as tracebacks."""
    harmless = ('"level": "info"', '"level": "debug"')
    return [line for line in lines if not any(word in line for word in harmless)]


def readable(line: str) -> str:
    """Format a JSON log line as text: the event, then its fields. Other lines do not change."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    omitted = {"event", "level", "timestamp", "logger", "service"}
    details = [f"{key}: {value}" for key, value in record.items() if key not in omitted and value not in ("", None)]
    return ", ".join([str(record["event"]).replace("_", " "), *details])
