"""The clock that system tests move: what of a process sees the jump, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.wall_clock import WallClock, require_compiler

HOURS = 26.0
_PROBE = """
import threading, time
print(time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic(), flush=True)
input()
time.sleep(0.01)  # all of these would wait for hours, or raise, with a moved deadline
threading.Event().wait(0.01)
condition = threading.Condition()
with condition:
    condition.wait(0.01)
print(time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic(), flush=True)
"""


@pytest.mark.services
def test_a_jump_moves_the_wall_clock_and_no_duration(tmp_path: Path) -> None:
    require_compiler()
    clock = WallClock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None, "piped"
        before = [float(value) for value in process.stdout.readline().split()]
        assert before[0] == pytest.approx(time.time(), abs=60)
        clock.jump(HOURS)
        process.stdin.write("\n")
        process.stdin.flush()
        after = [float(value) for value in process.stdout.readline().split()]
    wall, of_posix, monotonic = (now - then for now, then in zip(after, before, strict=True))
    assert wall == pytest.approx(HOURS * 3600 + monotonic, abs=1)
    assert of_posix == pytest.approx(wall, abs=1)
    assert 0 < monotonic < 60
    assert process.returncode == 0
