"""Do all services believe the same, and what is kept that nobody has a use for?

Every few seconds all tables are asked for and compared (`audit/checks.py`); what contradicts itself for longer than any
lease allows (`audit/suspicion.py`) is an orphan: reported, never repaired. Leases repair.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.audit.checks import KINDS, suspicions
from control_plane.audit.snapshot import Snapshot
from control_plane.audit.suspicion import MIN_SIGHTINGS, Finding, Suspicions, orphan_bytes
from control_plane.audit.table_reader import ANSWER_SECONDS, TableReader
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_LOOKS_PER_PATIENCE = 8
"""While something is suspected it is looked at so often, until it has lasted or was only on its way."""
_MIN_LOOKS_PER_PATIENCE = 3


@dataclass(frozen=True)
class AuditReport:
    """What one audit knew. `findings` have lasted, suspicions may be on their way."""

    findings: Sequence[Finding] = ()
    num_suspicions: int = 0
    patience_seconds: float = 0.0
    num_answered: int = 0
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Why a service's tables are not in it, by worker id."""
    num_left_out: int = 0
    """Rows that were too many for a table: nothing is concluded from their absence."""

    @property
    def orphan_bytes(self) -> int:
        return sum(orphan_bytes(self.findings).values())

    @property
    def is_open(self) -> bool:
        """Whether another audit may know more."""
        return bool(self.num_suspicions or self.unanswered)

    def by_service_and_kind(self) -> dict[tuple[str, str], int]:
        counted: Counter[tuple[str, str]] = Counter()
        for finding, num_bytes in orphan_bytes(self.findings).items():
            counted[finding.suspicion.service, finding.suspicion.kind] += num_bytes
        return dict(counted)


class Auditor:
    """Compares the tables of all registered services with each other and with this gateway's requests."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: LinkPool,
        gateway_id: str,
        *,
        is_alone: bool = True,
        audit_seconds: float = 10.0,
        grace_seconds: float = 5.0,
        asker: TableReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = AuditReport()
        self._registry = registry
        self._links = links
        self._gateway_id = gateway_id
        self._is_alone = is_alone
        self._audit_seconds = audit_seconds
        self._grace_seconds = grace_seconds
        self._asker = asker or TableReader()
        self._clock = clock
        self._suspicions = Suspicions()
        self._known: dict[tuple[str, str, str, str], Finding] = {}
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Audit for ever; oftener while something is suspected. Where it is never to be done, only wait."""
        if self._audit_seconds <= 0:
            await asyncio.Event().wait()
        while True:
            try:
                report = await self.audit()
            except Exception:  # the next one may be luckier, and requests do not depend on any
                log.exception("audit_failed")
                report = AuditReport()
            await asyncio.sleep(
                min(self._audit_seconds, _pause(report)) if report.num_suspicions else self._audit_seconds
            )

    async def audit(self) -> AuditReport:
        """Ask everyone once, and return what has lasted long enough to be an orphan."""
        async with self._turn:
            snapshot, unanswered = await self._look()
            patience = self._patience(snapshot)
            gap = patience / _MIN_LOOKS_PER_PATIENCE + ANSWER_SECONDS
            self._suspicions.update(suspicions(snapshot), snapshot.silent, self._clock(), patience, gap)
            self.report = AuditReport(
                findings=tuple(self._suspicions.findings(patience)),
                num_suspicions=self._suspicions.num_open(patience),
                patience_seconds=patience,
                num_answered=len(snapshot.answered),
                unanswered=unanswered,
                num_left_out=sum(each.tables.num_left_out for each in snapshot.answered.values()),
            )
            self._tell(self.report)
            return self.report

    async def verdict(self) -> AuditReport:
        """Audit until nothing is open any more: every difference has gone, or has lasted long enough.

        Takes a moment where all is well, else at most a little longer than the longest lease.
        """
        report, num_audits = await self.audit(), 1
        until = self._clock() + report.patience_seconds + 2 * _pause(report)
        while report.is_open and (self._clock() < until or num_audits <= MIN_SIGHTINGS):
            await asyncio.sleep(_pause(report))
            report, num_audits = await self.audit(), num_audits + 1
        return report

    def orphans_of(self, incarnation: str) -> list[dict[str, Any]]:
        """Return what a process is known to keep in vain, as plain values, the largest first."""
        counted = orphan_bytes(self.report.findings)
        found = [(finding, num) for finding, num in counted.items() if finding.suspicion.incarnation == incarnation]
        return [
            {
                "kind": finding.suspicion.kind,
                "what": KINDS[finding.suspicion.kind],
                "name": finding.suspicion.name,
                "num_bytes": num_bytes,
                "seconds": round(finding.seconds, 1),
            }
            for finding, num_bytes in sorted(found, key=lambda each: -each[1])
        ]

    async def close(self) -> None:
        await self._asker.close()

    async def _look(self) -> tuple[Snapshot, dict[str, str]]:
        """Take everyone's tables; our own are read last: what began meanwhile is known to both or to us alone."""
        workers = self._registry.workers()
        answered, silent = await self._asker.ask(workers)
        here = {worker.incarnation: worker for worker in self._registry.workers()}
        snapshot = Snapshot(
            answered={each.incarnation: each for each in answered},
            silent=frozenset(here.keys() - {each.incarnation for each in answered}),
            running=frozenset(self._links.running()),
            gateway_id=self._gateway_id,
            is_alone=self._is_alone,
        )
        why = {here[incarnation].worker_id: why for incarnation, why in silent.items() if incarnation in here}
        return snapshot, why

    def _patience(self, snapshot: Snapshot) -> float:
        leases = (each.tables.lease_ms / 1000 for each in snapshot.answered.values())
        return max(leases, default=0.0) + self._grace_seconds

    def _tell(self, report: AuditReport) -> None:
        """Log each orphan once as it is found, and once when it is gone."""
        found = {finding.suspicion.key: finding for finding in report.findings}
        for key in found.keys() - self._known.keys():
            finding = found[key]
            log.error(
                "kv_orphan",
                kind=finding.suspicion.kind,
                service=finding.suspicion.service,
                name=finding.suspicion.name,
                num_bytes=finding.num_bytes,
                seconds=round(finding.seconds, 1),
                **finding.suspicion.facts,
            )
        for key in self._known.keys() - found.keys():
            suspicion = self._known[key].suspicion
            log.info("kv_orphan_gone", kind=suspicion.kind, service=suspicion.service, name=suspicion.name)
        self._known = found


def _pause(report: AuditReport) -> float:
    return report.patience_seconds / _LOOKS_PER_PATIENCE
