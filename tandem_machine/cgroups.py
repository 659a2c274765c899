"""Finds the cgroups of this process, version 1 and 2, and reads their files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """A folder with the files of one cgroup; `version` is 1 or 2."""

    folder: Path
    version: int

    def text(self, name: str) -> str:
        """Return the text of a file without its line end, "" if there is none."""
        return read(self.folder / name).strip()

    def number(self, name: str) -> int | None:
        """Return the number in a file; None without a file, and for a limit that is not set ("max", -1)."""
        text = self.text(name)
        return int(text) if text.isdigit() else None

    def entry(self, name: str, key: str) -> int | None:
        """Return the number after `key` in a file of lines "key number"; None if there is none."""
        return entry_of(self.text(name), key)


def cgroups(controller: str) -> Iterator[Cgroup]:
    """Yield the cgroup of this process for a controller, then its parents, up to the outermost that it can see.

    A container may see a part of the tree only, at the root: folders that are not there have no files.
    """
    for line in read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = ROOT / controller if controllers else ROOT
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            yield Cgroup(root.joinpath(*names[:depth]), 1 if controllers else 2)


def entry_of(text: str, key: str) -> int | None:
    """Return the number after `key` in lines "key number"; None if there is none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.rstrip(":") == key:
            return int(value.split()[0])
    return None


def read(path: Path) -> str:
    """Return a file's text, "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
