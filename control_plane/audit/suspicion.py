"""When is a difference between two tables an orphan?

Two processes never say the same at the same moment. A difference is an orphan once several audits in a row, shortly
after each other, have seen it, the first and the last of them further apart than any lease and the time to act on its
end: until then it may be on its way. An audit in which someone did not answer says nothing of what only he could know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

MIN_SIGHTINGS = 3
"""Two could be the beginning and the end of something that was well in between."""

REGION = "region_of_the_gone"


@dataclass(frozen=True)
class Suspicion:
    """One thing, at one moment, that someone keeps and nobody should."""

    kind: str
    service: str
    """The worker id of the process in whose table it stands."""
    incarnation: str
    place: str
    """The incarnation in whose memory it lies."""
    name: str
    """What it is, in that memory: nothing is counted twice."""
    num_bytes: int
    needs: frozenset[str] = frozenset()
    """Incarnations whose answers say that it is one."""
    facts: Mapping[str, str | int] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.incarnation, self.place, self.name


@dataclass(frozen=True)
class Finding:
    """A suspicion that lasted. `num_bytes` is the least that there was all the while."""

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
    """Follows every suspicion from audit to audit."""

    def __init__(self) -> None:
        self._cases: dict[tuple[str, str, str, str], _Case] = {}

    def update(
        self, seen: Iterable[Suspicion], silent: frozenset[str], now: float, patience_seconds: float, gap_seconds: float
    ) -> None:
        """Take in what one audit saw; `silent` are those that are there and did not answer.

        A case that has not been seen for `gap_seconds` begins anew: nobody knows what was in between.
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
        """Return how many have yet to last long enough."""
        return sum(not case.has_lasted(patience_seconds) for case in self._cases.values())

    def findings(self, patience_seconds: float) -> list[Finding]:
        """Return what has lasted, each thing once, under the first kind that was seen of it."""
        found: dict[tuple[str, str], Finding] = {}
        for case in sorted(self._cases.values(), key=lambda case: case.first):
            if case.has_lasted(patience_seconds):
                finding = Finding(case.suspicion, case.last - case.first, case.num_bytes)
                found.setdefault((case.suspicion.place, case.suspicion.name), finding)
        return list(found.values())


def orphan_bytes(findings: Iterable[Finding]) -> dict[Finding, int]:
    """Return the bytes to count for each finding: what lies in a region that is itself an orphan is in its bytes."""
    findings = list(findings)
    whole = {finding.suspicion.place for finding in findings if finding.suspicion.kind == REGION}
    return {
        finding: 0 if finding.suspicion.place in whole and finding.suspicion.kind != REGION else finding.num_bytes
        for finding in findings
    }
