"""Decides when a difference between two tables is an orphan.

Two processes never change at the same moment, so differences are normal. A difference is an orphan after several
consecutive audits have seen it, the first and the last further apart than the longest lease and the grace time. If a
service did not answer, the audit decides nothing that needs this service's tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

MIN_SIGHTINGS = 3
"""Two sightings could be two separate, normal differences."""

REGION = "orphaned_region"


@dataclass(frozen=True)
class Suspicion:
    """Memory that one audit found to be kept without need."""

    kind: str
    service: str
    """Worker id of the process whose table has it."""
    incarnation: str
    place: str
    """Incarnation whose memory it is."""
    name: str
    """Unique name within that memory, so that nothing is counted twice."""
    num_bytes: int
    needs: frozenset[str] = frozenset()
    """Incarnations whose answers prove the suspicion."""
    facts: Mapping[str, str | int] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.incarnation, self.place, self.name


@dataclass(frozen=True)
class Finding:
    """A suspicion that lasted. `num_bytes` is the minimum over all sightings."""

    suspicion: Suspicion
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class _Case:
    suspicion: Suspicion
    first: float
    last: float
    num_sightings: int
    num_bytes: int

    def seen(self, suspicion: Suspicion, now: float) -> _Case:
        """Return the case with one more sighting."""
        num_bytes = min(self.num_bytes, suspicion.num_bytes)
        return replace(self, suspicion=suspicion, last=now, num_sightings=self.num_sightings + 1, num_bytes=num_bytes)

    def has_lasted(self, seconds: float) -> bool:
        return self.num_sightings >= MIN_SIGHTINGS and self.last - self.first >= seconds


class Suspicions:
    """Tracks suspicions from audit to audit."""

    def __init__(self) -> None:
        self._cases: dict[tuple[str, str, str, str], _Case] = {}

    def update(
        self, seen: Iterable[Suspicion], silent: frozenset[str], now: float, patience_seconds: float, gap_seconds: float
    ) -> None:
        """Add what one audit saw. `silent` are registered incarnations that did not answer.

        A case that was not seen for `gap_seconds` starts again: its state in between is unknown.
        """
        cases = {}
        for suspicion in seen:
            case = self._cases.get(suspicion.key)
            if case is None or (now - case.last > gap_seconds and not case.has_lasted(patience_seconds)):
                case = _Case(suspicion, now, now, 0, suspicion.num_bytes)
            cases[suspicion.key] = case.seen(suspicion, now)
        unknown = {key: case for key, case in self._cases.items() if case.suspicion.needs & silent}
        self._cases = {**unknown, **cases}

    def num_open(self, patience_seconds: float) -> int:
        """Return the number of suspicions that have not lasted long enough."""
        return sum(not case.has_lasted(patience_seconds) for case in self._cases.values())

    def findings(self, patience_seconds: float) -> list[Finding]:
        """Return the suspicions that have lasted, each memory once, under the kind that was seen first."""
        found: dict[tuple[str, str], Finding] = {}
        for case in sorted(self._cases.values(), key=lambda case: case.first):
            if case.has_lasted(patience_seconds):
                finding = Finding(case.suspicion, case.last - case.first, case.num_bytes)
                found.setdefault((case.suspicion.place, case.suspicion.name), finding)
        return list(found.values())


def orphan_bytes(findings: Iterable[Finding]) -> dict[Finding, int]:
    """Return the bytes to count for each finding. An orphaned region's bytes include all findings in the region."""
    findings = list(findings)
    whole = {finding.suspicion.place for finding in findings if finding.suspicion.kind == REGION}
    return {
        finding: 0 if finding.suspicion.place in whole and finding.suspicion.kind != REGION else finding.num_bytes
        for finding in findings
    }
