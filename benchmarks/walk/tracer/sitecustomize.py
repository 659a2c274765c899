"""Records which lines of a checkout a process runs, between two signals. Python imports this module at start.

    SIGUSR1   record from now on, into a new set
    SIGUSR2   stop, and write {file: [lines]} to TANDEM_WALK_OUT/<pid>-<number>.json

Only frames that start after the signal are traced; a coroutine counts as a new frame each time it resumes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = os.environ.get("TANDEM_WALK_ROOT", "")
_SKIPPED = tuple(f"{_ROOT}{folder}{os.sep}" for folder in (".venv", "tests", "benchmarks"))
_lines: set[tuple[str, int]] = set()
_is_recording = False
_numbers = itertools.count(1)


def _on_call(frame: FrameType, event: str, _: Any) -> Any:
    if not _is_recording:
        return None
    name = frame.f_code.co_filename
    if not name.startswith(_ROOT) or name.startswith(_SKIPPED):
        return None
    _lines.add((name, frame.f_lineno))
    return _on_line


def _on_line(frame: FrameType, event: str, _: Any) -> Any:
    if event == "line":
        _lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _on_line


def _start(*_: object) -> None:
    global _is_recording
    _lines.clear()
    _is_recording = True


def _stop(*_: object) -> None:
    global _is_recording
    _is_recording = False
    found: dict[str, list[int]] = {}
    for name, line in sorted(_lines):
        found.setdefault(os.path.relpath(name, _ROOT), []).append(line)
    out = Path(os.environ["TANDEM_WALK_OUT"]) / f"{os.getpid()}-{next(_numbers)}.json"
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"command": sys.orig_argv, "lines": found}))
    unfinished.rename(out)


if _ROOT:
    signal.signal(signal.SIGUSR1, _start)
    signal.signal(signal.SIGUSR2, _stop)
    threading.settrace(_on_call)
    sys.settrace(_on_call)
