"""Lets processes start with a low priority, as on a fleet, where they start on other machines than those that serve.

Starting is importing: some seconds of a core. On a machine of two cores that takes them from the workers that go on
with the streams of the process that has ended.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

import psutil

LOW_PRIORITY = "TANDEM_CHAOS_LOW_PRIORITY"
"""Set for a process that starts with it; `raise_priority` ends that."""
_NICENESS = 5
"""A third of the processor time of a process that serves, while there is not enough for both."""


def environment() -> dict[str, str]:
    """Return what a process that starts gets; empty without the right to raise its priority later."""
    return {LOW_PRIORITY: "1"} if _may_raise() else {}


def lower_if_asked() -> None:
    """Lower the priority of this process. Call before any thread or child begins."""
    if os.environ.pop(LOW_PRIORITY, ""):
        os.nice(_NICENESS)


def raise_priority(process: psutil.Process) -> None:
    """Give a process and its children, which serve now, the priority of this one."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for each in (process, *process.children(recursive=True)):
        while threads := [thread for thread in _threads(each.pid) if _niceness(thread, own) > own]:
            for thread in threads:
                _set(thread, own)


@cache
def _may_raise() -> bool:
    """Return whether this process may raise priorities: on Linux one thread has its own, so one thread tries."""
    found: list[bool] = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, own + 1)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, own)
        except PermissionError:
            return
        found.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(found)


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # it has ended
        return []


def _niceness(thread: int, if_ended: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return if_ended


def _set(thread: int, niceness: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except ProcessLookupError:
        return
