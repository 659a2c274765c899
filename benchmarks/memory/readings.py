"""Reads how much memory a process holds, and how much of it is shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
_PROC = Path("/proc")


@dataclass(frozen=True)
class Reading:
    """Bytes of one process. A mapped page that several share counts whole in `rss`, by its share in `pss`."""

    rss: int
    pss: int
    anonymous: int
    weights_rss: int
    """Of mapped files of packed weights."""
    weights_pss: int
    peak: int
    """Most that was resident since the process began (VmHWM)."""


def read(pid: int, weights_folder: Path) -> Reading:
    """Read what Linux knows of a process of ours; files below `weights_folder` are weights."""
    process = _PROC / str(pid)
    whole = _numbers((process / "smaps_rollup").read_text().splitlines()[1:])
    weights = weights_of((process / "smaps").read_text().splitlines(), str(weights_folder.resolve()))
    return Reading(
        rss=whole["Rss"],
        pss=whole["Pss"],
        anonymous=whole["Anonymous"],
        weights_rss=weights.get("Rss", 0),
        weights_pss=weights.get("Pss", 0),
        peak=_numbers((process / "status").read_text().splitlines())["VmHWM"],
    )


def weights_of(lines: Sequence[str], folder: str) -> dict[str, int]:
    """Return the sums of all mappings of files below `folder`, from the lines of /proc/PID/smaps."""
    sums: dict[str, int] = {}
    is_weights = False
    for line in lines:
        if _is_head(line):
            is_weights = line.partition("/")[2] != "" and f"/{line.partition('/')[2]}".startswith(f"{folder}/")
        elif is_weights:
            for name, count in _numbers([line]).items():
                sums[name] = sums.get(name, 0) + count
    return sums


def _is_head(line: str) -> bool:
    """Whether a line names a mapping: `55d1c0-55d1c4 r--p 00000000 fd:00 1234   /file`."""
    return not line.partition(" ")[0].endswith(":")


def _numbers(lines: Sequence[str]) -> dict[str, int]:
    """Return the bytes of lines like `Rss:   1234 kB`; others are passed over."""
    fields = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}
