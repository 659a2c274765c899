"""Gives a run what faults of the machine need: a small disk, and a wall clock of each process.

The run is started again as a process with these two:

    a mount namespace     of its own, in which a disk is mounted; the kernel takes it away with the last process
    a preloaded library   of tests/system/wall_clock.c: the control plane's clock jumps too, in the run's own process

What a machine lacks for is left out, by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.small_disk import SmallDisk
from tests.system.wall_clock import WallClock, has_compiler

CONTROL = "control"
"""The name of the clock of the gateway in this process."""
SECOND_GATEWAY = "gateway-b"
_FOLDER = "TANDEM_CHAOS_FOLDER"
_DISK_BYTES = 160 << 20
"""Two disk caches of 32 MiB, the state directory, and the rest for the file that fills the disk."""
_NAMESPACES = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])


def start_again_inside(folder: Path, arguments: Sequence[str]) -> None:
    """Replace this process by one inside, unless it is inside already."""
    if _FOLDER in os.environ:
        return
    clock = WallClock(folder, CONTROL).environment if has_compiler() else {}
    command = [*mount_namespace(), sys.executable, "-m", "tests.chaos", *arguments]
    os.execvpe(command[0], command, {**os.environ, **clock, _FOLDER: str(folder)})


def folder_inside() -> Path | None:
    """Return the folder of a run that is inside; None before."""
    return Path(os.environ[_FOLDER]) if _FOLDER in os.environ else None


@dataclass
class Surroundings:
    """What a run may use of its machine."""

    folder: Path
    disk: SmallDisk | None = None
    clocks: dict[str, WallClock] = field(default_factory=dict)
    """By the name of the process, the control plane's among them; empty without a compiler."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What faults are left out, and why."""

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> Surroundings:
        """Find out what is there, inside; `names` are those of the processes."""
        found = cls(folder)
        try:
            found.disk = SmallDisk(folder / "disk", _DISK_BYTES)
        except OSError as error:
            found.left_out["disk full, read-only"] = str(error)
        if "LD_PRELOAD" in os.environ:
            found.clocks = {name: WallClock(folder, name) for name in (*names, CONTROL)}
        else:
            found.left_out["clock, clocks"] = "there is no C compiler"
        return found

    @property
    def kept(self) -> Path:
        """Return the folder for what the fleet keeps on disk."""
        return self.disk.folder if self.disk is not None else self.folder

    def close(self) -> None:
        if self.disk is not None:
            self.disk.unmount()


def mount_namespace() -> list[str]:
    """Return the command that gives a process mounts of its own; none where that is refused."""
    for command in _NAMESPACES:
        try:
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    return []
