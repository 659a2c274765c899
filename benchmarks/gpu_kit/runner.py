"""Runs the parts one after the other, each within its time; a part that fails or dies takes no other along."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_kit.part import Part, Result, Settings
from benchmarks.lib.served import ROOT, clean_environment
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines

_MAX_LINE_BYTES = 1 << 24
_CLOSE_SECONDS = 40.0
"""For a process to close what it has opened; a whole Tandem drains."""
_LOG_LINES = 40
_MIN_SECONDS = 5.0
"""A part is not begun with less time than this."""


async def run_parts(
    parts: Sequence[Part],
    settings: Settings,
    environment: Mapping[str, str],
    seconds: float,
    report: Callable[[Part, Result], None],
    has_to_work: str = "",
) -> dict[str, Result]:
    """Run the parts within `seconds` together. If the part named `has_to_work` is not done, no other is run."""
    deadline = time.monotonic() + seconds
    results: dict[str, Result] = {}
    hands: Hands | None = None
    try:
        for part in parts:
            left = deadline - time.monotonic()
            if left < _MIN_SECONDS:
                result = Result("left_out", reason=f"the {seconds:g} s of the whole run were over; raise --minutes")
            else:
                hands = await _hands_for(part, hands, settings, environment)
                result = await hands.run(part.name, min(part.budget_seconds, left))
                if result.state == "failed":  # a card may stay broken for a process whose kernel failed
                    await hands.close()
                    result, hands = replace(result, log=hands.log_tail), None
            results[part.name] = result
            report(part, result)
            if part.name == has_to_work and result.state != "done":
                break
    finally:
        if hands is not None:
            await hands.close()
    return results


async def _hands_for(part: Part, hands: Hands | None, settings: Settings, environment: Mapping[str, str]) -> Hands:
    if hands is not None and hands.module == part.hands:
        return hands
    if hands is not None:
        await hands.close()
    return await Hands.start(part.hands, settings, environment)


class Hands:
    """A process that runs parts; the other end is `benchmarks.gpu_kit.hands`."""

    def __init__(self, module: str, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.module = module
        self._folder = folder
        self._process = process
        self._log = _log(folder, module)

    @classmethod
    async def start(cls, module: str, settings: Settings, environment: Mapping[str, str]) -> Hands:
        """Start the process; what it prints is in a log below the run's folder."""
        command = [sys.executable, "-m", "benchmarks.gpu_kit.hands", module]
        command += [settings.device, settings.form_name, str(settings.folder)]
        with _log(settings.folder, module).open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=clean_environment(settings.folder / "state", environment),
                cwd=ROOT,
                limit=_MAX_LINE_BYTES,
            )
        return cls(module, process, settings.folder)

    async def run(self, name: str, budget_seconds: float) -> Result:
        """Run one part; the process is of no more use if the part has failed."""
        started = time.monotonic()
        assert self._process.stdin is not None and self._process.stdout is not None, "started with pipes"
        self._process.stdin.write(json.dumps({"part": name}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), budget_seconds)
        except TimeoutError:
            return Result("failed", budget_seconds, reason=f"was not done within its {budget_seconds:.0f} s")
        if not line:
            await self._process.wait()  # it has closed its end
        return self._result(line, time.monotonic() - started)

    async def close(self) -> None:
        """End the process and all that it has started."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _CLOSE_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        left = _running_below(self._folder)  # of a process that has died
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in (await asyncio.to_thread(psutil.wait_procs, left, _CLOSE_SECONDS))[1]:
            process.kill()

    @property
    def log_tail(self) -> str:
        return "\n".join(last_lines(self._log, _LOG_LINES))

    def _result(self, line: bytes, seconds: float) -> Result:
        if not line:
            return Result("failed", seconds, reason="its process died")
        answer: dict[str, Any] = json.loads(line)
        if "figures" in answer:
            return Result("done", seconds, answer["figures"])
        if "left_out" in answer:
            return Result("left_out", seconds, reason=answer["left_out"])
        return Result("failed", seconds, reason=answer["failed"])


def _log(folder: Path, module: str) -> Path:
    return folder / f"{module.rpartition('.')[2]}.log"


def _running_below(folder: Path) -> list[psutil.Process]:
    """Return the processes whose working folder is this one or below it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder.resolve()):
                found.append(process)
    return found
