"""Reads the units of this folder: commands, variables, times, and what a process may do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
UNITS = sorted(FOLDER.glob("*.service"))


@dataclass(frozen=True)
class Unit:
    """A unit's file, as an instance: `tandem-decode@1` of tandem-decode@.service."""

    name: str
    values: Mapping[str, list[str]]
    """All values of each key, `Section.Key`, in order; an empty value has removed those before it."""

    def one(self, key: str) -> str:
        """Return the last value of a key of [Service]. Raises KeyError."""
        return self.values[f"Service.{key}"][-1]

    def all(self, key: str, section: str = "Service") -> list[str]:
        return self.values.get(f"{section}.{key}", [])

    @property
    def command(self) -> list[str]:
        return shlex.split(self.one("ExecStart"))

    @property
    def variables(self) -> dict[str, str]:
        """The variables of Environment=. Those of files are the operator's."""
        return dict(word.split("=", 1) for line in self.all("Environment") for word in shlex.split(line))

    @property
    def files(self) -> list[tuple[str, bool]]:
        """Files with more variables, and whether the unit starts without them."""
        return [(each.removeprefix("-"), each.startswith("-")) for each in self.all("EnvironmentFile")]

    @property
    def stop_seconds(self) -> int:
        return int(self.one("TimeoutStopSec"))


def read(path: Path, instance: str = "1") -> Unit:
    """Read a unit's file; `instance` takes the place of %i. Raises ValueError for a line that is none of a unit."""
    values: dict[str, list[str]] = {}
    section = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if found := re.fullmatch(r"\[(\w+)\]", line):
            section = found[1]
        elif found := re.fullmatch(r"(\w+)=(.*)", line):
            _add(values, f"{section}.{found[1]}", found[2].replace("%i", instance))
        else:
            raise ValueError(f"{path.name}, line {number}: {line!r} is no line of a unit")
    return Unit(path.stem.replace("@", f"@{instance}"), values)


def variables_of(text: str) -> dict[str, str]:
    """Return the variables of a file for EnvironmentFile=."""
    lines = [line.strip() for line in text.splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _add(values: dict[str, list[str]], key: str, value: str) -> None:
    if value:
        values.setdefault(key, []).append(value)
    else:
        values[key] = []
