"""Says which limit of the system an error comes from."""

from __future__ import annotations

_THREADS = ("can't start new thread", "Resource temporarily unavailable")
"""What Python says, and what C++ and fork say (EAGAIN)."""


def with_remedy(text: str) -> str:
    """Return the text of an error; if it is for lack of threads or processes, with what to set."""
    if not any(cause in text for cause in _THREADS):
        return text
    return (
        f"{text}; the limit of processes and threads is reached: raise it (pids.max of the container, TasksMax of "
        "systemd, ulimit -u), or give the engine fewer threads with --num-threads"
    )
