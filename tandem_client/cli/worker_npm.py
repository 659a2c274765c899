"""Where has npm (or pnpm) put a program that a Worker's folder brings with it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

_PNPM = ".pnpm/*/node_modules"


def find_program(folders: Iterable[Path], pattern: str) -> Path | None:
    """Return the file that fits `pattern` in the first node_modules that has one, the last of several versions."""
    for modules in (folder / "node_modules" for folder in folders):
        for where in (pattern, f"{_PNPM}/{pattern}"):
            if found := sorted(modules.glob(where)):
                return found[-1]
    return None


def with_parents(folder: Path) -> Iterator[Path]:
    """Yield the folders that Node.js looks for packages in."""
    yield from (folder, *folder.parents)
