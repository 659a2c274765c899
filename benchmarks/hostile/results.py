"""Computes tables, figures and targets from what was measured. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.hostile.exchange import Answer
from benchmarks.hostile.maker import Kind
from benchmarks.lib.command import Outcome, Sheet, Target
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile

MAX_P99_GROWTH_SECONDS = 0.05
MAX_LONGEST_GROWTH_SECONDS = 0.15
MAX_MEMORY_BYTES = 300_000_000
MAX_REFUSAL_SECONDS = 3.0
MAX_HONEST_SECONDS = 5.0
MAX_LAG_SECONDS = 0.05
_MB = 1e6


@dataclass(frozen=True)
class Seen:
    """What one kind of request did, beside the watched streams."""

    kind: Kind
    num_bytes: int
    answers: Sequence[Answer]
    p99_seconds: float
    longest_seconds: float
    memory_bytes: int
    """Most of the gateway and its children, over the quiet gateway."""
    num_ended: int
    """Watched streams that ended meanwhile."""

    @property
    def late_seconds(self) -> float:
        """The latest refusal, after the last byte or after the limit that it broke, whichever is kinder."""
        return max((_late(self.kind, answer) for answer in self.answers if answer.is_refused), default=0.0)

    @property
    def num_unanswered(self) -> int:
        return sum(answer.status is None and not answer.is_closed for answer in self.answers)

    @property
    def statuses(self) -> str:
        counts = Counter(str(answer.status or ("closed" if answer.is_closed else "none")) for answer in self.answers)
        return ", ".join(status if count == 1 else f"{count} x {status}" for status, count in counts.most_common())


def _late(kind: Kind, answer: Answer) -> float:
    after_limit = max(0.0, answer.since_first_byte - kind.limit_seconds)
    return min(answer.seconds, after_limit) if kind.limit_seconds else answer.seconds


@dataclass(frozen=True)
class Quiet:
    p99_seconds: float
    longest_seconds: float


@dataclass(frozen=True)
class Crowded:
    """Many senders at once, beside the streams."""

    title: str
    answers: Sequence[Answer]
    honest: Sequence[Answer]
    p99_seconds: float
    longest_seconds: float
    memory_bytes: int
    num_ended: int
    must_be_ok: bool
    """Whether each answer must be a 200: these senders are ordinary."""
    quiet: Quiet


@dataclass(frozen=True)
class Lag:
    title: str
    quiet_seconds: Sequence[float]
    seconds: Sequence[float]


@dataclass
class Results:
    quiet: list[Quiet] = field(default_factory=list)
    kinds: list[Seen] = field(default_factory=list)
    crowded: list[Crowded] = field(default_factory=list)
    lags: list[Lag] = field(default_factory=list)
    num_streams: int = 32

    @property
    def beside(self) -> Quiet:
        """The quiet runs together: the mean of their p99, the longest of their longest."""
        p99 = sum(each.p99_seconds for each in self.quiet) / len(self.quiet)
        return Quiet(p99, max(each.longest_seconds for each in self.quiet))


def enter(outcome: Outcome, results: Results) -> None:
    """Enter what there is."""
    if results.kinds:
        _enter_kinds(outcome, results)
    for crowded in results.crowded:
        _enter_crowded(outcome, crowded)
    for lag in results.lags:
        _enter_lag(outcome, lag)


def _enter_kinds(outcome: Outcome, results: Results) -> None:
    quiet = results.beside
    rows: Rows = []
    for seen in results.kinds:
        rows.append(
            (
                seen.kind.name.replace("_", " "),
                f"{seen.num_bytes / _MB:.1f}",
                seen.statuses,
                f"{seen.late_seconds:.1f}",
                f"{1000 * (seen.p99_seconds - quiet.p99_seconds):+.0f}",
                f"{1000 * (seen.longest_seconds - quiet.longest_seconds):+.0f}",
                f"{seen.memory_bytes / _MB:+.0f}",
                str(seen.num_ended),
            )
        )
    head = ("kind", "MB", "answers", "refused after, s", "p99 gap, ms", "longest, ms", "memory, MB", "streams ended")
    title = (
        f"One at a time, beside {results.num_streams} streams; gaps over the quiet run's "
        f"{1000 * quiet.p99_seconds:.0f} ms (p99) and {1000 * quiet.longest_seconds:.0f} ms (longest)"
    )
    outcome.sheets.append(Sheet(title, head, rows))
    worst_p99 = max(results.kinds, key=lambda seen: seen.p99_seconds)
    worst_longest = max(results.kinds, key=lambda seen: seen.longest_seconds)
    most_memory = max(results.kinds, key=lambda seen: seen.memory_bytes)
    latest = max(results.kinds, key=lambda seen: seen.late_seconds)
    num_ended = sum(seen.num_ended for seen in results.kinds)
    unanswered = [seen.kind.name for seen in results.kinds if seen.num_unanswered]
    outcome.figures |= {
        "kinds.num": len(results.kinds),
        "quiet.p99_ms": 1000 * quiet.p99_seconds,
        "quiet.longest_ms": 1000 * quiet.longest_seconds,
        "kinds.p99_growth_ms": 1000 * (worst_p99.p99_seconds - quiet.p99_seconds),
        "kinds.longest_growth_ms": 1000 * (worst_longest.longest_seconds - quiet.longest_seconds),
        "kinds.memory_bytes": most_memory.memory_bytes,
        "kinds.refused_after_seconds": latest.late_seconds,
        "kinds.num_streams_ended": num_ended,
        "kinds.num_unanswered": len(unanswered),
    }
    for seen in results.kinds:
        outcome.figures[f"longest_ms.{seen.kind.name}"] = 1000 * seen.longest_seconds
    outcome.targets += [
        *_gap_targets("one at a time", worst_p99.p99_seconds, worst_longest.longest_seconds, quiet),
        _memory_target(most_memory.kind.name, most_memory.memory_bytes),
        Target(
            f"refused within {latest.late_seconds:.1f} s ({latest.kind.name}), {MAX_REFUSAL_SECONDS:g} wanted",
            latest.late_seconds <= MAX_REFUSAL_SECONDS,
        ),
        Target(f"{num_ended} of the others' streams ended, 0 wanted", num_ended == 0),
        Target(f"{len(unanswered)} kinds without an answer {unanswered}, 0 wanted", not unanswered),
    ]


def _enter_crowded(outcome: Outcome, crowded: Crowded) -> None:
    counts = Counter(str(answer.status or "closed") for answer in crowded.answers)
    honest = [answer.since_first_byte for answer in crowded.honest]
    num_failed = sum(answer.status != 200 for answer in crowded.honest)
    num_unanswered = sum(answer.status is None for answer in crowded.answers)
    slowest = max(honest, default=0.0)
    rows: Rows = [
        ("answers", ", ".join(f"{count} x {status}" for status, count in counts.most_common())),
        ("p99 gap over the quiet run's", f"{1000 * (crowded.p99_seconds - crowded.quiet.p99_seconds):+.0f} ms"),
        ("longest over the quiet run's", f"{1000 * (crowded.longest_seconds - crowded.quiet.longest_seconds):+.0f} ms"),
        ("memory over the quiet gateway's", f"{crowded.memory_bytes / _MB:+.0f} MB"),
        ("an honest prompt of 100 KB took, at most", f"{slowest:.2f} s of {len(honest)}, {num_failed} failed"),
    ]
    outcome.sheets.append(Sheet(crowded.title, ("what", "how much"), rows))
    name = crowded.title.partition(":")[0].replace(" ", "_")
    outcome.figures |= {
        f"{name}.p99_growth_ms": 1000 * (crowded.p99_seconds - crowded.quiet.p99_seconds),
        f"{name}.longest_growth_ms": 1000 * (crowded.longest_seconds - crowded.quiet.longest_seconds),
        f"{name}.memory_bytes": crowded.memory_bytes,
        f"{name}.honest_seconds": slowest,
        f"{name}.num_honest_failed": num_failed,
        f"{name}.num_answers": len(crowded.answers),
        f"{name}.num_unanswered": num_unanswered,
        f"{name}.num_streams_ended": crowded.num_ended,
    }
    outcome.targets += [
        *_gap_targets(crowded.title, crowded.p99_seconds, crowded.longest_seconds, crowded.quiet),
        _memory_target(crowded.title, crowded.memory_bytes),
        Target(f"{crowded.title}: {crowded.num_ended} streams ended, 0 wanted", crowded.num_ended == 0),
        Target(f"{crowded.title}: {num_unanswered} without an answer, 0 wanted", num_unanswered == 0),
    ]
    if crowded.honest:
        took = f"an honest prompt took {slowest:.2f} s, {num_failed} failed"
        text = f"{crowded.title}: {took}; {MAX_HONEST_SECONDS:g} s wanted"
        outcome.targets.append(Target(text, slowest <= MAX_HONEST_SECONDS and num_failed == 0))
    if crowded.must_be_ok:
        num_bad = sum(answer.status != 200 for answer in crowded.answers)
        outcome.targets.append(Target(f"{crowded.title}: {num_bad} answers were no 200, 0 wanted", num_bad == 0))


def _enter_lag(outcome: Outcome, lag: Lag) -> None:
    quiet, longest = max(lag.quiet_seconds), max(lag.seconds)
    rows: Rows = [
        (
            name,
            f"{1000 * percentile(seconds, 50):.1f}",
            f"{1000 * percentile(seconds, 99):.1f}",
            f"{1000 * max(seconds):.1f}",
        )
        for name, seconds in (("quiet", lag.quiet_seconds), (lag.title, lag.seconds))
    ]
    outcome.sheets.append(Sheet("Round trips of GET /healthz, ms", ("while", "p50", "p99", "longest"), rows))
    outcome.figures |= {"lag.quiet_longest_ms": 1000 * quiet, "lag.longest_ms": 1000 * longest}
    lags = f"longest lag {1000 * longest:.0f} ms ({1000 * quiet:.0f} quiet)"
    text = f"{lag.title}: {lags}, {1000 * MAX_LAG_SECONDS:.0f} wanted"
    outcome.targets.append(Target(text, longest <= MAX_LAG_SECONDS))


def _gap_targets(title: str, p99: float, longest: float, quiet: Quiet) -> list[Target]:
    p99_growth, longest_growth = p99 - quiet.p99_seconds, longest - quiet.longest_seconds
    return [
        Target(
            f"{title}: p99 gap {1000 * p99_growth:+.0f} ms, {1000 * MAX_P99_GROWTH_SECONDS:+.0f} wanted",
            p99_growth <= MAX_P99_GROWTH_SECONDS,
        ),
        Target(
            f"{title}: longest gap {1000 * longest_growth:+.0f} ms, {1000 * MAX_LONGEST_GROWTH_SECONDS:+.0f} wanted",
            longest_growth <= MAX_LONGEST_GROWTH_SECONDS,
        ),
    ]


def _memory_target(name: str, num_bytes: int) -> Target:
    wanted = f"{MAX_MEMORY_BYTES / _MB:+.0f} wanted"
    return Target(f"{name}: memory {num_bytes / _MB:+.0f} MB, {wanted}", num_bytes <= MAX_MEMORY_BYTES)
