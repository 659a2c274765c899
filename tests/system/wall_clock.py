"""Gives processes a wall clock that a test moves while they run.

Only the wall clock jumps, as that of a machine that slept: CLOCK_MONOTONIC of Linux does not count sleep. libfaketime
is no help: without a moved CLOCK_MONOTONIC, each `time.sleep` of Python raises EINVAL under it (0.9.10, measured).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILERS = ("cc", "gcc", "clang")


class WallClock:
    """The clock of all processes that are started with `environment`. Only where `has_compiler`."""

    def __init__(self, folder: Path, name: str = "clock") -> None:
        """Clocks of one folder share the library; each has a `name` of its own."""
        self._file = folder / f"{name}.seconds-ahead"
        self._library = folder / "wall_clock.so"
        self._seconds_ahead = 0
        if not self._file.exists():  # else a process has mapped the file: it is not replaced
            self._file.write_bytes(struct.pack("=q", 0))
        if not self._library.exists():
            flags = "-O2", "-shared", "-fPIC", "-Wall", "-Werror"
            command = [_compiler(), *flags, str(_SOURCE), "-o", str(self._library), "-ldl"]
            subprocess.run(command, check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "TANDEM_TEST_CLOCK": str(self._file)}

    def jump(self, hours: float) -> None:
        """Move the clock of all processes at once."""
        self._seconds_ahead += round(hours * 3600)
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", self._seconds_ahead))


def has_compiler() -> bool:
    return _compiler() != ""


def require_compiler() -> None:
    """Without a C compiler, skip, or fail if skips are not allowed."""
    if has_compiler():
        return
    reason = f"there is no C compiler ({', '.join(_COMPILERS)}) for a clock that jumps; run `make services`"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _compiler() -> str:
    return next(filter(None, map(shutil.which, _COMPILERS)), "")
