"""How are child processes kept running, and how do they all come down?

    starting -> running -> died -> (back-off) -> running ...
                              \\-> gave up   after MAX_QUICK_DEATHS quick deaths in a row
                              \\-> refused   exit code 78 or 2: a wrong model or setting stays wrong

`Supervisor.run` returns when it is told to stop (0), when a process refuses, or when the last one of a role has given
up (1). Whatever the reason, workers end first and the control plane last, each with SIGTERM, then by force.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem_client.cli.child import Child, RestartPolicy, describe_exit, last_lines, readable, troubles
from tandem_client.cli.plan import ProcessSpec

REFUSALS = frozenset({2, 78})
"""Wrong flags (2, as every Unix command) or a refused model (78, EX_CONFIG of sysexits.h): the next try ends alike."""


Announce = Callable[[str, str], None]
"""Called with a process's name and one line about what became of it."""


class Supervisor:
    """Starts processes, starts them again when they die, and stops them in order."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_folder: Path,
        announce: Announce,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.children = [Child(spec, log_folder / f"{spec.name}.log") for spec in specs]
        self._announce = announce
        self._policy = policy or RestartPolicy()
        self._stop = asyncio.Event()
        self._on_stop: list[Callable[[], object]] = []
        self._exit_code = 0

    def stop(self) -> None:
        """Ask `run` to drain and return; the second time, not to wait. May be called from a loop's signal handler."""
        if self._stop.is_set():
            for child in self.children:
                child.kill()
        self._begin_stop()

    @property
    def specs(self) -> list[ProcessSpec]:
        """The processes that are still kept running."""
        return [child.spec for child in self.children if not child.gave_up]

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Have `callback` called as it begins to stop, before anything else is announced."""
        self._on_stop.append(callback)

    async def run(self) -> int:
        """Keep everything running until `stop`; returns the exit code of the command."""
        keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            # A keeper never ends by itself unless it gave up; one that raised is our own mistake and surfaces here.
            waiting = {stopped, *keepers}
            while not stopped.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopped}:
                    task.result()
        finally:
            for task in (stopped, *keepers):
                task.cancel()
            await asyncio.gather(stopped, *keepers, return_exceptions=True)
            await self._stop_all()
        return self._exit_code

    async def _keep(self, child: Child) -> None:
        while True:
            await child.start()
            code = await child.wait(self._policy)
            if code in REFUSALS:
                self._fail(child, f"refused to start: {_last_words(child)}\n    log: {child.log_path}")
                return
            if child.num_quick_deaths >= self._policy.max_quick_deaths:
                self._give_up(child, code)
                return
            delay = self._policy.delay_seconds(child.num_quick_deaths)
            self._announce(child.spec.name, f"{describe_exit(code)}; starting again in {delay:g} s{_tail(child)}")
            await asyncio.sleep(delay)

    def _give_up(self, child: Child, code: int) -> None:
        child.gave_up = True
        what = f"{describe_exit(code)}, {child.num_quick_deaths} times in a row; not starting it again"
        others = [other for other in self.children if other.spec.role == child.spec.role and not other.gave_up]
        if others:
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
        """Stop workers, then the KV service, then the control plane: what runs can still finish and be answered."""
        deadline = time.monotonic() + self._policy.drain_seconds
        for stage in (("prefill", "decode"), ("kv",), ("control",)):
            stage_children = [child for child in self.children if child.spec.role in stage]
            left = max(1.0, deadline - time.monotonic())
            drained = await asyncio.gather(*(child.stop(left) for child in stage_children))
            for child, clean in zip(stage_children, drained, strict=True):
                if not clean:
                    self._announce(child.spec.name, "did not drain in time and was killed")


def _last_words(child: Child) -> str:
    return next((readable(line) for line in last_lines(child.log_path, 1)), "it said nothing")


def _tail(child: Child) -> str:
    lines = [readable(line) for line in troubles(last_lines(child.log_path, 5))]
    return "".join(f"\n    {line}" for line in [*lines, f"log: {child.log_path}"])
