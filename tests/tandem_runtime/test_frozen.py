"""A process ends if a library keeps the interpreter lock, and only then."""

from __future__ import annotations

import subprocess
import sys

_FROZEN = """
import ctypes
from tandem_runtime import frozen

with frozen.watched(0.5):
    ctypes.PyDLL(None).sleep(60)  # unlike CDLL, it keeps the interpreter lock
"""
_BUSY = """
import time
from tandem_runtime import frozen

with frozen.watched(0.5):
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass
print("went on")
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)


def test_a_frozen_interpreter_ends_with_the_stacks_of_its_threads() -> None:
    ended = _run(_FROZEN)
    assert ended.returncode == 1
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert 'File "<string>", line 6 in <module>' in ended.stderr


def test_code_that_runs_for_long_does_not_end_its_process() -> None:
    ended = _run(_BUSY)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")
