"""A process that runs in the background yields, and the session of a worker that was started alone does too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_AUTOGROUP = Path("/proc/self/autogroup")
_CHILD = """
import os, sys
from pathlib import Path
from tandem_machine.priority import run_in_background
run_in_background(with_session=sys.argv[1] == "with")
autogroup = Path("/proc/self/autogroup")
print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH, autogroup.exists() and autogroup.read_text().split()[-1])
"""
_LEADER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"


def _run(session: str, *, leads: bool) -> list[str]:
    """Run a child of a process that leads a session of its own, or of one that does not."""
    command = [sys.executable, "-c", _LEADER, _CHILD, session]
    if not leads:
        command = [sys.executable, "-c", _LEADER, _LEADER, _CHILD, session]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, start_new_session=True, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("session", "leads", "yields"), [("with", True, True), ("with", False, False), ("without", True, False)]
)
def test_the_process_yields_and_its_session_only_if_its_parent_leads_it(
    session: str, leads: bool, yields: bool
) -> None:
    nice, is_batch, of_session = _run(session, leads=leads)
    assert (int(nice), is_batch) == (os.nice(0) + 10, "True")
    if _AUTOGROUP.exists():
        assert of_session == ("10" if yields else "0")
