"""Records what really happened, independent of the processes.

Every slab is recorded with its bytes at the time of the seal. A reader that accepts other bytes, or a slab that was
never sealed, is a violation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from tandem_engine.messages import ExtentRef
from tandem_runtime.kv_handle import HandleState

Extents = dict[tuple[str, int, int, int], tuple[int, bytes]]


class Violation(AssertionError):
    """The simulation found the system in an illegal state."""


class Truth:
    """One per run; the processes never read it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self.edges: Counter[tuple[str, HandleState, HandleState]] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.events: deque[str] = deque(maxlen=50)
        self._now = now
        self._sealed: Extents = {}
        self._violations: list[str] = []

    def note(self, event: str) -> None:
        self.events.append(f"{self._now():12.4f} {event}")

    def violated(self, what: str) -> None:
        """Store a violation; `raise_if_violated` raises it where no code under test can catch it."""
        self.note(f"VIOLATION {what}")
        self._violations.append(what)

    def raise_if_violated(self) -> None:
        if self._violations:
            raise Violation("; ".join(self._violations))

    def sealed(self, extent: Any, content: bytes) -> None:
        """Record bytes that became visible. The same slot in the same generation must always hold the same bytes."""
        key = extent.region_id, extent.slot, extent.generation, extent.offset
        known = self._sealed.setdefault(key, (extent.num_bytes, content))
        if known != (extent.num_bytes, content):
            self.violated(f"slot {extent.slot} of {extent.region_id} was sealed twice in one generation, differently")

    def accepted(self, extent: ExtentRef, content: bytes) -> None:
        """Check bytes that a reader accepted."""
        self.counts["blocks accepted by readers"] += 1
        if extent.region_id.startswith("staged-"):  # fetched over gRPC into a region of the reader's own
            return
        known = self._sealed.get((extent.region_id, extent.slot, extent.generation, extent.offset))
        if known is None:
            self.violated(f"a reader accepted slot {extent.slot} of {extent.region_id}, which was never sealed")
        elif known[1] != content:
            self.violated(f"a reader accepted slot {extent.slot} of {extent.region_id} with other bytes than sealed")
