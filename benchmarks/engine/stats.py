"""Computes medians, shares of the roofline, ratios and targets from an engine's turns. Pure.

tokens/s   decode: of the whole batch; prefill: of one prompt
roofline   the least time in which the machine's limits, measured right before each round of turns, let a step's
           bytes be read and its operations be done, the one beside the other; the share is that time in the time it
           took, the median of all turns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.engine.limits import Limits
from benchmarks.lib.command import Sheet, Target
from benchmarks.lib.engine_models import ShapeFacts
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import Figures, flat, percentile

MIN_ROOFLINE_SHARE = 0.85
MIN_COMPAT_SHARE = 0.85


@dataclass(frozen=True)
class Phase:
    """What is measured in turns: decoding at one batch size, or (batch 0) prefill."""

    batch: int
    num_tokens: int
    """Of the prompt; decoding: of the context, in the middle of the measurement."""

    @property
    def name(self) -> str:
        return f"decode_b{self.batch}" if self.batch else "prefill"

    @property
    def title(self) -> str:
        return f"decode, batch {self.batch}" if self.batch else f"prefill {self.num_tokens}"

    def has(self, batches: Sequence[int]) -> bool:
        """Whether an engine that is measured at these batch sizes takes part."""
        return not self.batch or self.batch in batches

    def limit_tokens_per_second(self, facts: ShapeFacts, weight_bytes: int, limits: Limits) -> float:
        """Return what the machine allows, keys and values in float32, weights of so many bytes per number."""
        weights = facts.num_step_parameters * weight_bytes
        if not self.batch:
            head = facts.num_step_parameters - facts.num_body_parameters
            attention = self.num_tokens * facts.attention_flops(self.num_tokens // 2)
            flops = 2 * facts.num_body_parameters * self.num_tokens + 2 * head + attention
            return self.num_tokens / limits.seconds(weights, flops)
        num_bytes = weights + self.batch * self.num_tokens * facts.kv_bytes_per_token
        flops = self.batch * (2 * facts.num_step_parameters + facts.attention_flops(self.num_tokens))
        return self.batch / limits.seconds(num_bytes, flops)


@dataclass
class Turns:
    """What one engine did in one phase."""

    tokens_per_second: list[float] = field(default_factory=list)
    num_disturbed: int = 0
    """Turns during which others used the machine, however often they were repeated."""
    peak_bytes: int = 0
    limits: list[Limits] = field(default_factory=list)
    """Of the machine, at each turn."""
    rooflines: list[float] = field(default_factory=list)
    """Tokens per second that those allowed, at each turn."""

    @property
    def median(self) -> float:
        return percentile(self.tokens_per_second, 50)

    @property
    def share(self) -> float:
        by_turn = zip(self.tokens_per_second, self.rooflines, strict=True)
        return percentile([speed / most for speed, most in by_turn], 50)

    @property
    def figures(self) -> Figures:
        return {
            "tokens_per_second": self.median,
            "tokens_per_second.low": min(self.tokens_per_second),
            "tokens_per_second.high": max(self.tokens_per_second),
            "roofline_share": self.share,
            "num_turns": len(self.tokens_per_second),
            "num_disturbed_turns": self.num_disturbed,
            "peak_mib": self.peak_bytes / 2**20,
        }


ByEngine = Mapping[str, Turns]
ByPhase = Mapping[str, ByEngine]


@dataclass(frozen=True)
class Wanted:
    """A ratio of the issue's: of two engines' medians in one phase of shape M."""

    phase: str
    ours: str
    other: str
    at_least: float


_FP32, _BF16, _COMPAT = "tandem_lean_fp32", "tandem_lean_bf16", "tandem_compat"
WANTED = (
    Wanted("decode_b1", _FP32, "openvino", 1.0),
    Wanted("decode_b1", _BF16, "openvino", 1.5),
    Wanted("decode_b8", _FP32, "openvino", 1.15),
    Wanted("decode_b32", _FP32, "openvino", 1.3),
    Wanted("prefill", _FP32, "openvino", 1.0),
    Wanted("decode_b1", _FP32, "llama_cpp", 1.1),
    Wanted("decode_b8", _FP32, "llama_cpp", 1.6),
    Wanted("decode_b32", _FP32, "llama_cpp", 2.4),
    Wanted("prefill", _FP32, "llama_cpp", 1.3),
    Wanted("decode_b1", _COMPAT, _FP32, MIN_COMPAT_SHARE),
    Wanted("decode_b8", _COMPAT, _FP32, MIN_COMPAT_SHARE),
)


def targets(by_phase: ByPhase) -> tuple[list[Target], list[str]]:
    """Return the issue's targets as far as both sides were measured, and the others by name."""
    met, open_ones = [], []
    for want in WANTED:
        engines = by_phase.get(want.phase, {})
        text = f"{want.phase}: {want.ours} / {want.other}"
        if want.ours not in engines or want.other not in engines:
            open_ones.append(text)
            continue
        ratio = engines[want.ours].median / engines[want.other].median
        met.append(Target(f"{text} = {ratio:.2f}, at least {want.at_least:g}", ratio >= want.at_least))
    if (alone := by_phase.get("decode_b1", {}).get(_FP32)) is None:
        return met, [*open_ones, f"decode_b1: share of the roofline of {_FP32}"]
    text = f"decode_b1: {_FP32} at {alone.share:.0%} of the roofline, at least {MIN_ROOFLINE_SHARE:.0%}"
    return [*met, Target(text, alone.share >= MIN_ROOFLINE_SHARE)], open_ones


def figures(shape: str, by_phase: ByPhase, ours: Sequence[str]) -> Figures:
    """Return flat `shape.phase.engine.name` figures, and the ratios of ours to all others."""
    found: Figures = {}
    for phase, engines in by_phase.items():
        for name, turns in engines.items():
            found |= flat(f"{shape}.{phase}.{name}", turns.figures)
        ratios = {
            f"{mine}_to_{other}": engines[mine].median / engines[other].median
            for mine in ours
            if mine in engines
            for other in engines
            if other != mine
        }
        found |= flat(f"{shape}.{phase}.ratio", ratios)
    return found


def sheets(shape: str, by_phase: ByPhase, phases: Sequence[Phase], ours: Sequence[str]) -> list[Sheet]:
    """Return a table of speeds, one of roofline shares, and one of ratios."""
    done = [phase for phase in phases if phase.name in by_phase]
    engines = list(dict.fromkeys(name for phase in done for name in by_phase[phase.name]))
    head = ("", *(phase.title for phase in done))
    speed: Rows = [(name, *(_speed(by_phase[phase.name].get(name)) for phase in done)) for name in engines]
    shares: Rows = [(name, *(_share(by_phase[phase.name].get(name)) for phase in done)) for name in engines]
    ratios: Rows = [
        (f"{mine} / {other}", *(_ratio(by_phase[phase.name], mine, other) for phase in done))
        for mine in ours
        if mine in engines
        for other in engines
        if other != mine
    ]
    tables = [
        Sheet(f"shape {shape}: tokens/s, median (lowest-highest); !: turns disturbed", head, speed),
        Sheet(f"shape {shape}: share of the roofline, peak memory in MiB", head, shares),
        Sheet(f"shape {shape}: ratios of medians", head, ratios),
    ]
    return [table for table in tables if table.rows]


def limit_figures(shape: str, seen: Sequence[Limits]) -> Figures:
    """Return what the machine could do before the rounds: the median, the lowest and the highest."""
    reads, flops = [each.read_bytes_per_second / 1e9 for each in seen], [each.flops_per_second / 1e9 for each in seen]
    by_name = {"read_gb_per_second": reads, "gflops": flops}
    return {
        f"{shape}.limit.{name}{end}": value
        for name, values in by_name.items()
        for end, value in (("", percentile(values, 50)), (".low", min(values)), (".high", max(values)))
    }


def limit_sheet(shape: str, seen: Sequence[Limits]) -> Sheet:
    """Return the limits that the shares refer to."""
    found = limit_figures(shape, seen)
    cells = [
        f"{found[name]:.4g} ({found[f'{name}.low']:.4g}-{found[f'{name}.high']:.4g})"
        for name in (f"{shape}.limit.read_gb_per_second", f"{shape}.limit.gflops")
    ]
    title = f"shape {shape}: the machine's limits before each round, median (lowest-highest)"
    return Sheet(title, ("", "read GB/s", "GFLOP/s"), [(seen[0].how, *cells)])


def unmeasured_sheet(names: Sequence[str]) -> Sheet:
    """Return the targets of which a side is missing."""
    return Sheet("targets that were not measured", ("target",), [(name,) for name in names])


def _speed(turns: Turns | None) -> str:
    if turns is None:
        return "-"
    numbers = turns.tokens_per_second
    mark = f" {turns.num_disturbed}!" if turns.num_disturbed else ""
    return f"{_short(turns.median)} ({_short(min(numbers))}-{_short(max(numbers))}){mark}"


def _share(turns: Turns | None) -> str:
    return "-" if turns is None else f"{turns.share:.0%}, {turns.peak_bytes / 2**20:,.0f}"


def _ratio(engines: ByEngine, mine: str, other: str) -> str:
    return f"{engines[mine].median / engines[other].median:.2f}" if {mine, other} <= set(engines) else "-"


def _short(number: float) -> str:
    """Write three digits, or all of a whole number."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
