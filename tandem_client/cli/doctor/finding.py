"""One thing that was examined, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]
"""`note`: something that this machine does without. `warn`: Tandem runs, but badly. `fail`: Tandem does not run."""


@dataclass(frozen=True)
class Finding:
    about: str
    """The thing, in one or two words."""
    level: Level
    text: str
    """What was found, with figures."""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level in ("warn", "fail") and not self.remedy:
            raise ValueError(f"{self.about}: a finding of level {self.level} names a remedy")


def size(num_bytes: float) -> str:
    """Return bytes as GiB, or MiB below one GiB."""
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.0f} MiB"
