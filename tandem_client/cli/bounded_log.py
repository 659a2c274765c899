"""Bounds the log of a process that runs: its newest part stays in place, the part before that in one older file."""

from __future__ import annotations

import os
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


def bound_log(path: Path, max_bytes: int) -> bool:
    """Move a log of more than `max_bytes` to NAME.log.1, which is replaced, and empty it; return whether it did.

    The process has the log open for appending, so it continues at the new end. What it writes between the last read and
    the emptying is lost: some lines at most, for there is no call that does both at once.
    """
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        return False
    if num_bytes <= max_bytes:
        return False
    older, draft = older_log(path), path.with_suffix(".log.1.part")
    with path.open("rb") as log, draft.open("wb") as copy:
        log.seek(num_bytes - max_bytes)
        while piece := log.read(_PIECE_BYTES):  # also what is written meanwhile
            copy.write(piece)
        os.truncate(path, 0)
    draft.replace(older)
    return True


def older_log(path: Path) -> Path:
    """Return where the older part of a log is, and the log of an earlier run."""
    return path.with_suffix(".log.1")
