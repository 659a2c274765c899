"""Computes tables, figures and targets from the gateway's readings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.lib.command import Outcome, Sheet, Target
from benchmarks.lib.report import Rows

MIN_OF_CEILING = 0.5
MIN_TOKENS_PER_SECOND = 20_000
MAX_IDLE_BYTES = 1_000_000_000
MIN_TWO = 1.8
MAX_GROWTH = 0.02
"""Of the memory at the beginning, in ten minutes."""
MAX_BYTES_PER_SLOW_CLIENT = 8 << 20
MIN_BESIDE = 0.8
"""What the others keep of their share beside clients that do not read."""
_TEN_MINUTES = 600.0
_TICK_SECONDS = 0.01
_MIN_GROWTH_SECONDS = 300.0
"""A shorter run gives no figure for the growth in ten minutes."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Rate:
    """Events of some streams, and what they took."""

    num_events: int
    seconds: float
    server_cpu_seconds: float
    worker_cpu_seconds: float
    client_cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.num_events / self.seconds

    @property
    def per_cpu_second(self) -> float:
        """Events per CPU second of the server, whatever client and worker can take. Linux counts CPU time in ticks."""
        return self.num_events / max(self.server_cpu_seconds, _TICK_SECONDS)

    def busy(self) -> tuple[float, float, float]:
        """Return which shares of a core server, worker and client had."""
        each = self.server_cpu_seconds, self.worker_cpu_seconds, self.client_cpu_seconds
        return each[0] / self.seconds, each[1] / self.seconds, each[2] / self.seconds


@dataclass(frozen=True)
class Two:
    together: list[list[Rate]]
    """By round, one rate per gateway."""
    alone: list[Rate]
    """Of one gateway with as many streams."""
    half: list[Rate]
    """Of one with half of them, as each of the two has."""
    first_share: float
    """Of the streams that the first gateway got."""
    has_cores: bool
    """Whether each gateway had a core; else both share one, and CPU seconds are compared."""

    @property
    def ratio(self) -> float:
        """Two gateways' tokens a second by one's."""
        if self.has_cores:
            return median(sum(each.per_second for each in rates) for rates in self.together) / _per_second(self.alone)
        capacity = median(sum(each.per_cpu_second for each in rates) for rates in self.together)
        return capacity / _per_cpu_second(self.alone)


@dataclass(frozen=True)
class Paced:
    num_streams: int
    token_seconds: float
    events_per_second: float
    resident_bytes: int
    bytes_before: int
    cpu_share: float

    @property
    def bytes_per_stream(self) -> float:
        return (self.resident_bytes - self.bytes_before) / self.num_streams


@dataclass(frozen=True)
class Slow:
    num_clients: int
    bytes_per_client: float
    num_explained: int
    """Clients that read late and received the reason for the end."""
    most_events: int
    """That one of them got: those within the bound, and those in buffers."""
    num_cut: int
    """Of the half that never read."""
    cut_after_seconds: float
    others_alone: Rate
    others_beside: Rate


@dataclass(frozen=True)
class Flat:
    samples: Sequence[tuple[float, float]]
    """Seconds and bytes."""
    num_answers: int
    rate: Rate

    @property
    def growth(self) -> float:
        """In ten minutes, as a share of the memory at the beginning; the line of least squares."""
        slope, at_start = line(self.samples)
        return slope * _TEN_MINUTES / at_start


@dataclass
class Results:
    rates: Mapping[str, Sequence[Rate]] = field(default_factory=dict)
    two: Two | None = None
    paced: list[Paced] = field(default_factory=list)
    """Idle streams, and others at the pace of an engine."""
    slow: Slow | None = None
    flat: Flat | None = None


def line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and height at 0 of the line of least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
    return slope, mean_y - slope * mean_x


def enter(outcome: Outcome, results: Results) -> None:
    """Enter what there is."""
    if results.rates:
        _enter_rates(outcome, results.rates)
    if results.two:
        _enter_two(outcome, results.two)
    if results.paced:
        _enter_paced(outcome, results.paced)
    if results.slow:
        _enter_slow(outcome, results.slow)
    if results.flat:
        _enter_flat(outcome, results.flat)


_NAMES = {
    "bare": "bare Starlette + sse-starlette, constant events",
    "native": "gateway, AI.run over REST",
    "chat": "gateway, OpenAI chat completions",
}


def _enter_rates(outcome: Outcome, rates: Mapping[str, Sequence[Rate]]) -> None:
    ceiling = _per_cpu_second(rates["bare"])
    rows: Rows = []
    for name, some in rates.items():
        busy = " / ".join(f"{median(each.busy()[i] for each in some):.0%}" for i in range(3))
        per_cpu = _per_cpu_second(some)
        rows.append((_NAMES[name], f"{_per_second(some):,.0f}", f"{per_cpu:,.0f}", f"{per_cpu / ceiling:.2f}", busy))
        outcome.figures |= {f"{name}.per_second": _per_second(some), f"{name}.per_cpu_second": per_cpu}
        if name == "bare":
            continue
        outcome.figures[f"{name}.of_ceiling"] = per_cpu / ceiling
        outcome.targets += [
            Target(
                f"{_NAMES[name]}: {per_cpu:,.0f} tokens per CPU second, {MIN_TOKENS_PER_SECOND:,} wanted",
                per_cpu >= MIN_TOKENS_PER_SECOND,
            ),
            Target(
                f"{_NAMES[name]}: {per_cpu / ceiling:.2f} of the bare app's rate, {MIN_OF_CEILING} wanted",
                per_cpu / ceiling >= MIN_OF_CEILING,
            ),
        ]
    head = ("server", "events/s", "events per CPU second", "of the bare app", "busy: server / worker / client")
    outcome.sheets.append(Sheet("Rates, medians over rounds", head, rows))


def _enter_two(outcome: Outcome, two: Two) -> None:
    together = median(sum(each.per_second for each in rates) for rates in two.together)
    capacity = median(sum(each.per_cpu_second for each in rates) for rates in two.together)
    rows: Rows = [
        ("one gateway", f"{_per_second(two.alone):,.0f}", f"{_per_cpu_second(two.alone):,.0f}", "100%"),
        ("one gateway, half the streams", f"{_per_second(two.half):,.0f}", f"{_per_cpu_second(two.half):,.0f}", "100%"),
        (
            "two on one port",
            f"{together:,.0f}",
            f"{capacity:,.0f}",
            f"{two.first_share:.0%} / {1 - two.first_share:.0%}",
        ),
    ]
    what = "events/s, a core each" if two.has_cores else "per CPU second of each, summed: here both share one core"
    head = ("gateways", "events/s", "events per CPU second, summed", "streams")
    outcome.sheets.append(Sheet("Two processes on one port", head, rows))
    outcome.figures |= {"two.ratio": two.ratio, "two.per_second": together, "two.per_cpu_second": capacity}
    outcome.targets.append(
        Target(f"two on one port: {two.ratio:.2f} times one ({what}), {MIN_TWO} wanted", two.ratio >= MIN_TWO)
    )


def _enter_paced(outcome: Outcome, paced: Sequence[Paced]) -> None:
    rows: Rows = [
        (
            f"{each.num_streams:,} streams, a token every {each.token_seconds:g} s",
            f"{each.resident_bytes / 1e6:.0f} MB",
            f"{each.bytes_per_stream / 1000:.0f} kB",
            f"{each.events_per_second:,.0f}",
            f"{each.cpu_share:.0%}",
        )
        for each in paced
    ]
    head = ("clients", "gateway's memory", "per stream", "events/s", "of a core")
    outcome.sheets.append(Sheet("Streams at a pace", head, rows))
    if len(paced) > 1:
        outcome.figures |= {
            "paced.events_per_second": paced[1].events_per_second,
            "paced.cpu_share": paced[1].cpu_share,
        }
    idle = paced[0]
    outcome.figures |= {
        "idle.num_streams": idle.num_streams,
        "idle.resident_bytes": idle.resident_bytes,
        "idle.bytes_per_stream": idle.bytes_per_stream,
        "idle.cpu_share": idle.cpu_share,
    }
    outcome.targets.append(
        Target(
            f"{idle.num_streams:,} streams in {idle.resident_bytes / 1e6:.0f} MB, "
            f"under {MAX_IDLE_BYTES / 1e6:.0f} wanted",
            idle.resident_bytes < MAX_IDLE_BYTES,
        )
    )


def _enter_slow(outcome: Outcome, slow: Slow) -> None:
    half = slow.num_clients // 2
    beside, alone = slow.others_beside.per_second, slow.others_alone.per_second
    rows: Rows = [
        ("memory per client that does not read, at most", f"{slow.bytes_per_client / _MIB:.1f} MiB"),
        ("events that one of them had waiting, buffers included", f"{slow.most_events:,}"),
        ("received the reason, as they read on", f"{slow.num_explained} of {half}"),
        ("cut, as they never read", f"{slow.num_cut} of {half} after {slow.cut_after_seconds:.0f} s"),
        ("the others' events/s alone", f"{alone:,.0f}"),
        ("the others' events/s beside them", f"{beside:,.0f}"),
    ]
    outcome.sheets.append(Sheet(f"{slow.num_clients} clients that do not read", ("what", "how much"), rows))
    outcome.figures |= {
        "slow.bytes_per_client": slow.bytes_per_client,
        "slow.most_events": slow.most_events,
        "slow.num_explained": slow.num_explained,
        "slow.num_cut": slow.num_cut,
        "slow.cut_after_seconds": slow.cut_after_seconds,
        "slow.others_alone": alone,
        "slow.others_beside": beside,
    }
    outcome.targets += [
        Target(
            f"a client that does not read costs {slow.bytes_per_client / _MIB:.1f} MiB, "
            f"at most {MAX_BYTES_PER_SLOW_CLIENT >> 20} wanted",
            slow.bytes_per_client <= MAX_BYTES_PER_SLOW_CLIENT,
        ),
        Target(
            f"{slow.num_explained} of {half} received the reason, {slow.num_cut} of {half} were cut",
            slow.num_explained == slow.num_cut == half,
        ),
    ]


def _enter_flat(outcome: Outcome, flat: Flat) -> None:
    slope, at_start = line(flat.samples)
    seconds = flat.samples[-1][0]
    is_long_enough = seconds >= _MIN_GROWTH_SECONDS
    most = max(size for _, size in flat.samples)
    row = (
        f"{seconds:.0f} s, {flat.num_answers:,} answers",
        f"{flat.rate.per_second:,.0f}",
        f"{at_start / _MIB:.1f}",
        f"{most / _MIB:.1f}",
        f"{slope * _TEN_MINUTES / _MIB:+.1f}" if is_long_enough else "not measured",
    )
    head = ("load", "events/s", "MiB at the beginning", "most", "growth in ten minutes, MiB")
    outcome.sheets.append(Sheet("Memory at load", head, [row]))
    outcome.figures |= {
        "flat.seconds": seconds,
        "flat.num_answers": flat.num_answers,
        "flat.per_second": flat.rate.per_second,
        "flat.resident_bytes": at_start,
        "flat.most_bytes": most,
    }
    if not is_long_enough:
        return
    outcome.figures["flat.growth_bytes"] = slope * _TEN_MINUTES
    outcome.targets.append(
        Target(
            f"memory grows by {flat.growth:+.1%} in ten minutes, at most {MAX_GROWTH:.0%} wanted",
            flat.growth <= MAX_GROWTH,
        )
    )


def _per_second(rates: Sequence[Rate]) -> float:
    return median(rate.per_second for rate in rates)


def _per_cpu_second(rates: Sequence[Rate]) -> float:
    return median(rate.per_cpu_second for rate in rates)
