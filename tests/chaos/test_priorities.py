from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.chaos import priorities

_PROGRAM = """
import subprocess, sys, threading
from tests.chaos.priorities import lower_if_asked

lower_if_asked()
threads = [threading.Thread(target=sys.stdin.read) for _ in range(2)]
for thread in threads:
    thread.start()
child = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"])
child.wait()
"""


def test_a_process_starts_with_a_low_priority_and_serves_with_that_of_others() -> None:
    environment = priorities.environment()
    if not environment:
        pytest.skip("this user may not raise priorities")
    program = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(
        program, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # its threads run, and its child
        started = psutil.Process(process.pid)
        family = [started, *started.children()]
        assert len(family) == 2
        own = psutil.Process().nice()
        assert [each.nice() - own for each in family] == [5, 5]
        priorities.raise_priority(started)
        assert {os.getpriority(os.PRIO_PROCESS, thread.id) for each in family for thread in each.threads()} == {own}
        process.stdin.close()
