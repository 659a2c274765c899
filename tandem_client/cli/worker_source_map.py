"""Which line of which source does a place in a bundle come from?

https://tc39.es/ecma426/: version 3, as esbuild writes it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_DIGITS = {char: value for value, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
_PLACE = re.compile(r"(?<![\w/.-])index\.js:(\d+):(\d+)")


@dataclass(frozen=True)
class _Origin:
    column: int
    source: int
    source_line: int
    source_column: int


@dataclass(frozen=True)
class SourceMap:
    """The map of a bundle called index.js; it is read when it is first asked."""

    text: str
    written_in: Path
    """The folder that its sources are relative to."""
    folder: Path
    """The Worker's, which the answers are relative to."""
    num_lines_before: int = 0
    """Lines that were put before the bundle."""

    def located(self, line: str) -> str:
        """Return a line of text with the places in the bundle replaced by those in the sources."""
        return _PLACE.sub(lambda place: self._source_of(int(place[1]), int(place[2])) or place[0], line)

    def _source_of(self, line: int, column: int) -> str | None:
        """Return "src/index.ts:3:14"; lines and columns count from 1 there, from 0 in the map."""
        origins = self._origins.get(line - 1 - self.num_lines_before, [])
        index = bisect_right(origins, column - 1, key=lambda origin: origin.column) - 1
        if index < 0:
            return None
        origin = origins[index]
        path = (self.written_in / self._sources[origin.source]).resolve()
        shown = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path
        return f"{shown}:{origin.source_line + 1}:{origin.source_column + 1}"

    @cached_property
    def _said(self) -> dict[str, list[str] | str]:
        said: dict[str, list[str] | str] = json.loads(self.text)
        return said

    @property
    def _sources(self) -> list[str]:
        return list(self._said["sources"])

    @cached_property
    def _origins(self) -> dict[int, list[_Origin]]:
        """By line of the bundle, in the order of columns."""
        found: dict[int, list[_Origin]] = {}
        source = source_line = source_column = 0
        for number, line in enumerate(str(self._said["mappings"]).split(";")):
            column = 0
            for segment in line.split(",") if line else []:
                steps = list(_numbers(segment))
                column += steps[0]
                if len(steps) >= 4:
                    source, source_line, source_column = (
                        source + steps[1],
                        source_line + steps[2],
                        source_column + steps[3],
                    )
                    found.setdefault(number, []).append(_Origin(column, source, source_line, source_column))
        return found


def _numbers(segment: str) -> Iterator[int]:
    """Yield a segment's numbers: five bits a digit, its sixth bit says that more come, the first of all is the sign."""
    value = shift = 0
    for char in segment:
        digit = _DIGITS[char]
        value += (digit & 31) << shift
        shift += 5
        if not digit & 32:
            yield -(value >> 1) if value & 1 else value >> 1
            value = shift = 0
