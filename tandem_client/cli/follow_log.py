"""How do `--verbose` users see what the processes log?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

POLL_SECONDS = 0.2


async def follow_logs(paths: Sequence[Path], console: Console) -> None:
    """Print every line that is added to `paths`, with the process's name before it, until cancelled."""
    readers = [LogReader(path) for path in paths]
    width = max(len(path.stem) for path in paths)
    try:
        while True:
            _print_new(readers, width, console)
            await asyncio.sleep(POLL_SECONDS)
    finally:
        _print_new(readers, width, console)


class LogReader:
    """Reads a log's complete lines as they are added; the file may come later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as log:
            log.seek(self._offset)
            complete = log.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return complete.decode("utf-8", errors="replace").split("\n")


def _print_new(readers: Sequence[LogReader], width: int, console: Console) -> None:
    for reader in readers:
        for line in reader.new_lines():
            console.print(Text.assemble((f"{reader.path.stem:<{width}} │ ", "dim"), line), soft_wrap=True)
