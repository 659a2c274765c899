"""Gives processes a wall clock that a test moves while they run: libfaketime, which `make services` installs.

Only the wall clock jumps, as that of a machine that slept: CLOCK_MONOTONIC of Linux does not count sleep.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")


class WallClock:
    """The clock of all processes that are started with `environment`. Only where `has_faketime`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._library = _libraries()[0]
        self.hours = 0.0
        self.jump(0.0)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds between two looks at the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, hours: float) -> None:
        """Move the clock; processes see it within a second."""
        self.hours += hours
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"+{round(self.hours * 3600)}\n")
        draft.replace(self._file)


def has_faketime() -> bool:
    return bool(_libraries())


def require_faketime() -> None:
    """Without libfaketime, skip, or fail if skips are not allowed."""
    if has_faketime():
        return
    reason = f"libfaketime is not installed: no {_LIBRARIES[0]}; run `make services`"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _libraries() -> list[Path]:
    """Return where libfaketime for programs with threads is installed."""
    return [path for pattern in _LIBRARIES for path in Path("/").glob(pattern.removeprefix("/"))]
