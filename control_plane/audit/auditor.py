"""Audits the KV memory of all services.

Every few seconds the auditor reads and compares the tables of all services (`audit/checks.py`). A difference that lasts
longer than any lease (`audit/suspicion.py`) is an orphan. Orphans are reported and not repaired: leases do that.
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
from control_plane.audit.suspicion import MIN_SIGHTINGS, Finding, Suspicion, Suspicions, orphan_bytes
from control_plane.audit.table_reader import ANSWER_SECONDS, TableReader
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_AUDITS_PER_PATIENCE = 8
"""Audits per patience while there are suspicions; patience is the longest lease and the grace time."""
_MIN_AUDITS_PER_PATIENCE = 3


@dataclass(frozen=True)
class AuditReport:
    """The result of one audit. Findings have lasted; suspicions may still disappear."""

    findings: Sequence[Finding] = ()
    num_suspicions: int = 0
    patience_seconds: float = 0.0
    num_answered: int = 0
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Errors of services whose tables are missing, by worker id."""
    num_left_out: int = 0
    """Rows beyond the maximum of their table. Their absence proves nothing."""

    @property
    def orphan_bytes(self) -> int:
        return sum(orphan_bytes(self.findings).values())

    @property
    def is_open(self) -> bool:
        """Whether a later audit may know more."""
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
        table_reader: TableReader,
        *,
        is_alone: bool = True,
        audit_seconds: float = 10.0,
        grace_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = AuditReport()
        self._registry = registry
        self._links = links
        self._gateway_id = gateway_id
        self._is_alone = is_alone
        self._audit_seconds = audit_seconds
        self._grace_seconds = grace_seconds
        self._table_reader = table_reader
        self._clock = clock
        self._suspicions = Suspicions()
        self._known: dict[tuple[str, str, str, str], Finding] = {}
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Audit until cancelled, more often while there are suspicions. With audits switched off, only wait."""
        if self._audit_seconds <= 0:
            await asyncio.Event().wait()
        while True:
            try:
                report = await self.audit()
            except Exception:  # requests do not depend on audits, and the next one may succeed
                log.exception("audit_failed")
                report = AuditReport()
            await asyncio.sleep(
                min(self._audit_seconds, _pause(report)) if report.num_suspicions else self._audit_seconds
            )

    async def audit(self) -> AuditReport:
        """Read all tables once, and return a report with the suspicions that have become orphans."""
        async with self._turn:
            snapshot, unanswered = await self._snapshot()
            patience = self._patience(snapshot)
            gap = patience / _MIN_AUDITS_PER_PATIENCE + ANSWER_SECONDS
            found = await asyncio.to_thread(_suspicions, snapshot)
            self._suspicions.update(found, snapshot.silent, self._clock(), patience, gap)
            self.report = AuditReport(
                findings=tuple(self._suspicions.findings(patience)),
                num_suspicions=self._suspicions.num_open(patience),
                patience_seconds=patience,
                num_answered=len(snapshot.answered),
                unanswered=unanswered,
                num_left_out=sum(each.tables.num_left_out for each in snapshot.answered.values()),
            )
            self._log_changes(self.report)
            return self.report

    async def verdict(self) -> AuditReport:
        """Audit until every difference has disappeared or has lasted long enough, and return the last report.

        This is fast if there is no difference; otherwise it takes little longer than the longest lease.
        """
        report, num_audits = await self.audit(), 1
        until = self._clock() + report.patience_seconds + 2 * _pause(report)
        while report.is_open and (self._clock() < until or num_audits <= MIN_SIGHTINGS):
            await asyncio.sleep(_pause(report))
            report, num_audits = await self.audit(), num_audits + 1
        return report

    def orphans_of(self, incarnation: str) -> list[dict[str, Any]]:
        """Return the orphans in a process's tables as plain values, the largest first."""
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
        await self._table_reader.close()

    async def _snapshot(self) -> tuple[Snapshot, dict[str, str]]:
        """Read all tables, our own last: a request that starts meanwhile is known to us, and perhaps to a worker."""
        workers = self._registry.workers()
        answered, silent = await self._table_reader.read(workers)
        here = {worker.incarnation: worker for worker in self._registry.workers()}
        snapshot = Snapshot(
            answered={each.incarnation: each for each in answered},
            silent=frozenset(here.keys() - {each.incarnation for each in answered}),
            running=frozenset(self._links.running()),
            gateway_id=self._gateway_id,
            is_alone=self._is_alone,
        )
        errors = {here[incarnation].worker_id: error for incarnation, error in silent.items() if incarnation in here}
        return snapshot, errors

    def _patience(self, snapshot: Snapshot) -> float:
        leases = (each.tables.lease_ms / 1000 for each in snapshot.answered.values())
        return max(leases, default=0.0) + self._grace_seconds

    def _log_changes(self, report: AuditReport) -> None:
        """Log each orphan once when it is found, and once when it is gone."""
        found = {finding.suspicion.key: finding for finding in report.findings}
        for key in found.keys() - self._known.keys():
            finding = found[key]
            log.error(
                "kv_orphan",
                kind=finding.suspicion.kind,
                worker=finding.suspicion.service,
                name=finding.suspicion.name,
                num_bytes=finding.num_bytes,
                seconds=round(finding.seconds, 1),
                **finding.suspicion.facts,
            )
        for key in self._known.keys() - found.keys():
            suspicion = self._known[key].suspicion
            log.info("kv_orphan_gone", kind=suspicion.kind, worker=suspicion.service, name=suspicion.name)
        self._known = found


def _suspicions(snapshot: Snapshot) -> list[Suspicion]:
    """Compare all tables, in a thread: a thousand workers have a million rows, and streams run on the loop."""
    return list(suspicions(snapshot))


def _pause(report: AuditReport) -> float:
    return report.patience_seconds / _AUDITS_PER_PATIENCE
