"""What memory a process with its children has taken, and what is left for another one like it."""

from __future__ import annotations

from pathlib import Path

import psutil

from tandem_machine.memory import usable_memory


def available_bytes() -> int:
    return usable_memory().available_bytes


def used_bytes(pid: int) -> int:
    """Return the bytes of a process and its children that another such process would take, too.

    Pages of files, such as libraries, are shared; a KV pool counts once, at the engine. 0 if the process has ended.
    """
    try:
        process = psutil.Process(pid)
        return sum(_own_bytes(each) for each in [process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def _own_bytes(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # no Linux, or it has just ended
        return process.memory_info().rss if process.is_running() else 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
