"""Prints which lines of a run held and which did not, and where to look."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from control_plane.audit.auditor import AuditReport
from tests.chaos.co_runners import MAX_CORES
from tests.chaos.embeddings import EmbeddingQuestion
from tests.chaos.injection import counted
from tests.chaos.pauses import Pause, quantiles
from tests.chaos.stream_record import STAGES, StreamRecord

if TYPE_CHECKING:
    from tests.chaos.runner import Run

_MAX_SHOWN = 5
_MAX_LINES = 60


@dataclass(frozen=True)
class Law:
    """One line of the table."""

    name: str
    found: str
    holds: bool
    details: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class End:
    """What was found once nobody asked any more."""

    failure: str
    """Why a service did not come up again; "" if all did."""
    left: str
    """Which pools did not become full; "" if all did."""
    audit: AuditReport
    unbalanced: Sequence[str]
    """What gateways and workers have counted differently."""
    misbilled: Sequence[str]
    """What is wrong in the ledger."""
    num_free: int
    """Whole answers whose gateway was killed before their end was written."""
    num_lost: int
    """Answers whose gateway was killed after that, and before their first byte was sent."""


class Verdict:
    """The table of a run, and the details of its failures."""

    def __init__(self, run: Run, end: End) -> None:
        self._run = run
        audit, failure, left = end.audit, end.failure, end.left
        orphans = [str(finding) for finding in audit.findings] + [str(why) for why in audit.unanswered.items()]
        self.laws = [
            *self._laws_of_streams(),
            Law("every service came up again", "no" if failure else "yes", not failure, (failure,)),
            Law("every pool is back to full", "no" if left else "yes", not left, (left,)),
            Law("kv_orphan_bytes", str(audit.orphan_bytes), not orphans, orphans),
            self._law_of_the_gateway(),
            Law("grants and counters that differ", str(len(end.unbalanced)), not end.unbalanced, end.unbalanced),
            self._law_of_the_ledger(end),
            self._law_of_gateway_faults(),
            *self._laws_of_bursts(),
            self._law_of_embeddings(),
            self._law_of_roles(),
            self._law_of_stages(),
            *self._laws_of_certificates(),
            self._law_of_pauses(),
        ]

    @property
    def holds(self) -> bool:
        return all(law.holds for law in self.laws)

    # ----------------------------------------------------------------------------------------------------- laws

    def _laws_of_streams(self) -> Iterator[Law]:
        record, http = self._run.records, self._run.http_records
        yield self._law_of_each("requests that failed", lambda each: [repr(each.error)] if each.has_failed else [])
        yield self._law_of_each("streams with other tokens", lambda each: list(each.wrong_tokens()))
        yield self._law_of_each("streams with wrong usage", lambda each: list(each.wrong_usage()))
        yield self._law_of_each(
            "waits past a deadline", lambda each: [f"{each.ended - each.deadline:.1f} s"] if each.was_late else []
        )
        wrong = [f"{each.request_id}: {each.failure}" for each in http if each.failure]
        yield Law(
            "HTTP streams that failed or differ", f"{len(wrong)} of {len(http)}", not wrong, self._stories(http, wrong)
        )
        assert record, "somebody has asked"

    def _law_of_each(self, name: str, wrong: Callable[[StreamRecord], Sequence[str]]) -> Law:
        found = [(each, what) for each in self._run.records if (what := "; ".join(wrong(each)))]
        details = [self._story(each, what) for each, what in found[:_MAX_SHOWN]]
        return Law(name, f"{len(found)} of {len(self._run.records)}", not found, details)

    def _law_of_the_gateway(self) -> Law:
        dispatcher = self._run.fleet.gateway.dispatcher
        flying = dispatcher.router.in_flight
        left = {
            "waiting": len(dispatcher.queue),
            "tasks": len(dispatcher.background),
            "prefill tokens": flying.prefill_tokens.total(),
            "decode tokens": flying.decode_tokens.total(),
            "quarantined": len(dispatcher.quarantine),
        }
        found = ", ".join(f"{name} {number}" for name, number in left.items() if number)
        return Law("left in the control plane", found or "nothing", not found)

    def _law_of_the_ledger(self, end: End) -> Law:
        found = f"{len(end.misbilled)}; of killed gateways {end.num_free} were free, {end.num_lost} paid and lost"
        return Law("rows that are not the answers", found, not end.misbilled, end.misbilled[:_MAX_SHOWN])

    def _laws_of_bursts(self) -> Iterator[Law]:
        """Each burst is more than there is room for: some are refused. All are answered in the end: the law of HTTP."""
        if not self._run.options.burst_size:
            return
        bursts = self._run.bursts.over
        found = ", ".join(f"{each.num_refused} of {len(each.records)}" for each in bursts)
        yield Law("refused in bursts", found or "no burst", any(each.num_refused for each in bursts))

    def _law_of_embeddings(self) -> Law:
        """Their vectors are compared like all answers over HTTP; here is only whether there were any."""
        num = sum(isinstance(each.question, EmbeddingQuestion) for each in self._run.http_records)
        return Law("requests for vectors", str(num), num > 0)

    def _law_of_gateway_faults(self) -> Law:
        """A fault that meets no stream proves nothing."""
        met = self._run.gateway_faults.num_met
        found = ", ".join(f"{kind} {number}" for kind, number in met.items())
        return Law("streams met by the end of a gateway", found, all(met.values()))

    def _law_of_roles(self) -> Law:
        """No member of the fleet calls what its role may not: such an error looks like any other loss."""
        lines = [f"{log.stem}: {line}" for log in self._logs() for line in _lines_about(log, " may be called by ")]
        return Law("calls refused for a role", str(len(lines)), not lines, lines[:_MAX_SHOWN])

    def _law_of_stages(self) -> Law:
        left = Counter(each.left_at for each in self._run.records if each.left_at is not None)
        left_queue = sum(each.left_admission_queue for each in self._run.records)
        found = ", ".join(f"{stage} {left[stage]}" for stage in STAGES) + f"; in the admission queue {left_queue}"
        return Law("clients that left", found, min(left[s] for s in STAGES) >= self._run.options.least_left_per_stage)

    def _laws_of_certificates(self) -> Iterator[Law]:
        """Each service has renewed about every half of a certificate's validity; at least one rotation took place."""
        run, seconds = self._run, self._run.options.certificate_seconds
        if run.rotations is None:
            return
        logs = run.folder / "control.log", run.gateways[1].log
        renewed = [line for log in logs for line in _lines_about(log, "member_renewed")]
        least = int(len(run.fleet.services) * run.faults.seconds / seconds)  # half of what is due: some are down
        yield Law("certificates renewed", f"{len(renewed)}, at least {least}", len(renewed) >= least)
        switched, left = run.rotations.num_switched, run.rotations.num_left
        yield Law("authorities", f"{switched} rotated, {left} of the old ones left", switched > 0)

    def _law_of_pauses(self) -> Law:
        """Judge only streams whose KV cache survived, with another worker available, on an otherwise idle machine.

        In a burst a stream may find the other worker full: pauses there are shown, and not judged.
        """
        survived = [p for p in self._run.pauses.all if p.has_survived and p.had_another and p.seconds is not None]
        promised = [pause for pause in survived if not self._was_in_burst(pause)]
        in_bursts = [pause.seconds or 0.0 for pause in survived if self._was_in_burst(pause)]
        judged = [pause for pause in promised if not self._had_busy_neighbours(pause)]
        seconds = sorted(pause.seconds or 0.0 for pause in judged)
        p99 = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] if seconds else 0.0
        details = [str(pause) for pause in sorted(judged, key=lambda each: -(each.seconds or 0.0))[:_MAX_SHOWN]]
        left_out = f"; {len(promised) - len(judged)} more while others used the machine" if judged != promised else ""
        left_out += f"; in bursts {quantiles(in_bursts)}" if in_bursts else ""
        holds = p99 <= self._run.options.longest_p99_pause_seconds
        return Law("pause beyond detection, KV survived", quantiles(seconds) + left_out, holds, details)

    def _was_in_burst(self, pause: Pause) -> bool:
        return self._run.bursts.were_under_way(pause.detected_at, pause.detected_at + (pause.seconds or 0.0))

    def _had_busy_neighbours(self, pause: Pause) -> bool:
        until = pause.detected_at + (pause.seconds or 0.0)
        return self._run.co_runners.mean_cores(pause.detected_at, until) > MAX_CORES

    # ------------------------------------------------------------------------------------------------- the table

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        run = self._run
        yield f"seed {run.options.seed}: {run.faults.seconds:.0f} s, {len(run.all_faults)} faults, " + _shortly(run)
        yield from (f"left out: {kinds}: {why}" for kinds, why in run.surroundings.left_out.items())
        yield "network: " + ", ".join(f"{fault} {number}" for fault, number in counted(run.counts).items())
        all_pauses = [pause.seconds for pause in run.pauses.all if pause.seconds is not None]
        yield f"other programs had {run.co_runners.mean_cores():.2f} cores of the machine"
        yield f"all pauses of streams whose decode worker was lost, {quantiles(all_pauses)}"
        yield ""
        for law in self.laws:
            yield f"{'held  ' if law.holds else 'BROKEN'}  {law.name:<42} {law.found}"
        if not self.holds:
            yield from self._why()

    def _why(self) -> Iterator[str]:
        yield "\nfaults:"
        yield from (str(fault) for fault in self._run.all_faults)
        for law in self.laws:
            if not law.holds:
                yield f"\n=== {law.name}"
                yield from law.details
        yield f"\nlogs: {self._run.folder}; repeat the run with --seed {self._run.options.seed}"

    def as_json(self) -> dict[str, Any]:
        run = self._run
        return {
            "seed": run.options.seed,
            "seconds": round(run.faults.seconds, 1),
            "left_out": run.surroundings.left_out,
            "faults": [vars(fault) for fault in run.all_faults],
            "neighbours_cores": round(run.co_runners.mean_cores(), 2),
            "network": dict(counted(run.counts)),
            "pauses": [vars(pause) for pause in run.pauses.all],
            "laws": [{"name": law.name, "found": law.found, "holds": law.holds} for law in self.laws],
        }

    # --------------------------------------------------------------------------------------------------- stories

    def _story(self, record: StreamRecord, what: str) -> str:
        began = time.monotonic() - self._run.faults.seconds
        times = f"asked at {record.started - began:.1f} s, ended at {record.ended - began:.1f} s of the fault_run"
        head = f"\n--- {record.request_id} ({record.question.name}): {what}\n{times}; route {record.route}"
        pauses = [str(pause) for pause in self._run.pauses.all if pause.request_id == record.request_id]
        return "\n".join([head, *pauses, *self._log_lines(record.request_id)])

    def _stories(self, http: Sequence[Any], wrong: Sequence[str]) -> list[str]:
        ids = [each.request_id for each in http if each.failure][:_MAX_SHOWN]
        return ["\n".join(["\n--- " + what, *self._log_lines(name)]) for what, name in zip(wrong, ids, strict=False)]

    def _log_lines(self, request_id: str) -> list[str]:
        """Return the log lines of a request from all processes."""
        found = [f"{log.stem}: {line}" for log in self._logs() for line in _lines_about(log, request_id)]
        return found[-_MAX_LINES:]

    def _logs(self) -> list[Path]:
        return sorted(self._run.folder.glob("*.log"))


def _shortly(run: Run) -> str:
    kinds = Counter(fault.kind for fault in run.all_faults)
    done = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
    whole = sum(record.is_whole for record in run.records)
    migrated = len({(pause.request_id, pause.choice_index) for pause in run.pauses.all})
    http = run.http_records
    refused = sum(record.num_refused for record in http)
    cut_off = sum(len(record.broken_ids) for record in http), sum(record.num_unreached for record in http)
    impatient = sum(record.error is not None and not record.has_failed for record in run.records)
    return (
        f"({done}); {len(run.records) + len(run.http_records)} streams, {len(run.http_records)} of them over HTTP; "
        f"{refused} times refused for a disk that could not be written or a gateway that drained, {cut_off[0]} times "
        f"cut off by the end of a gateway, {cut_off[1]} times without a connection; {_bursts(run)}; "
        f"{whole} answered whole, {migrated} migrated, {impatient} had passed deadlines of their own"
    )


def _bursts(run: Run) -> str:
    if not run.options.burst_size:
        return "no bursts"
    seconds = " s, ".join(f"{burst.seconds:.1f}" for burst in run.bursts.over)
    refused = sum(each.num_overloaded for each in run.http_records), sum(each.num_refused for each in run.records)
    return (
        f"bursts of {run.options.burst_size} requests for {seconds} s; "
        f"{refused[0]} HTTP and {refused[1]} other requests refused for lack of room"
    )


def _lines_about(log: Path, request_id: str) -> list[str]:
    with log.open(errors="replace") as lines:
        return [line.rstrip() for line in lines if request_id in line]
