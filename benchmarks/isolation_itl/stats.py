"""Computes figures from the token times of streams beside long prompts. Pure.

ITL         gaps between tokens of the streams that decode all the while
TTFT        of the long prompts, from being sent to their first token
goodput     long prompts per second that met the TTFT target with their own tokens at the ITL target on average,
            and the streams' tokens per second that came within the ITL target
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.lib.command import Sheet, Target
from benchmarks.lib.report import MAX_FOREIGN_CPU_SHARE, Rows
from benchmarks.lib.stats import Figures, flat, percentile

MAX_P99_TO_P50 = 1.5
_LATENCIES = {
    "itl_ms.p50": "ITL p50",
    "itl_ms.p99": "ITL p99",
    "itl_ms.max": "ITL max",
    "itl_p99_to_p50": "p99/p50",
    "alone.itl_ms.p50": "alone: p50",
    "alone.itl_ms.p99": "alone: p99",
    "ttft_s.p50": "TTFT p50, s",
    "ttft_s.p99": "TTFT p99, s",
}
_THROUGHPUTS = {
    "stream_tokens_per_second": "decode tok/s",
    "stream_tokens_in_time_per_second": "of it in time",
    "prompt_tokens_per_second": "prefill tok/s",
    "prompts_in_time_per_second": "prompts/s in time",
    "num_gaps": "gaps",
    "num_prompts": "prompts",
    "foreign_cpu_share": "others' CPU",
}


@dataclass(frozen=True)
class Prompt:
    """A long prompt: when it was sent, and when each of its tokens came. Seconds on one clock."""

    sent: float
    num_tokens: int
    token_times: tuple[float, ...]
    """Empty: nothing came before we gave up."""

    @property
    def ttft_seconds(self) -> float:
        return self.token_times[0] - self.sent if self.token_times else float("inf")

    @property
    def tpot_seconds(self) -> float:
        """The mean gap between its own tokens; 0 where there is but one."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


@dataclass(frozen=True)
class Observed:
    """One run of one system. Each stream is one answer's token times."""

    streams: Sequence[Sequence[float]]
    prompts: Sequence[Prompt]
    alone: tuple[float, float]
    """When the streams ran by themselves."""
    loaded: tuple[float, float]
    """When prompts were sent."""
    foreign_cpu_share: float

    def gaps(self, window: tuple[float, float]) -> list[float]:
        """Return the gaps that ended within a window."""
        start, end = window
        pairs = (pair for stream in self.streams for pair in pairwise(stream))
        return [later - earlier for earlier, later in pairs if start <= later < end]


@dataclass(frozen=True)
class InTime:
    """What counts as in time."""

    ttft_seconds: float
    itl_seconds: float


def figures(runs: Sequence[Observed], in_time: InTime) -> Figures:
    """Return what the runs of one system come to, taken together."""
    gaps = [gap for run in runs for gap in run.gaps(run.loaded)]
    alone = [gap for run in runs for gap in run.gaps(run.alone)]
    prompts = [prompt for run in runs for prompt in run.prompts]
    seconds = sum(run.loaded[1] - run.loaded[0] for run in runs)
    answered_seconds = sum(_answered_seconds(run) for run in runs)
    ttfts = [prompt.ttft_seconds for prompt in prompts]
    kept = [each for each in prompts if _is_in_time(each, in_time)]
    p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
    return {
        "itl_ms.p50": 1000 * p50,
        "itl_ms.p99": 1000 * p99,
        "itl_ms.max": 1000 * max(gaps),
        "itl_p99_to_p50": p99 / p50,
        "ttft_s.p50": _late_percentile(ttfts, 50),
        "ttft_s.p99": _late_percentile(ttfts, 99),
        "stream_tokens_per_second": len(gaps) / seconds,
        "prompt_tokens_per_second": sum(each.num_tokens for each in prompts if each.token_times) / answered_seconds,
        "prompts_in_time_per_second": len(kept) / seconds,
        "stream_tokens_in_time_per_second": sum(gap <= in_time.itl_seconds for gap in gaps) / seconds,
        "alone.itl_ms.p50": 1000 * percentile(alone, 50),
        "alone.itl_ms.p99": 1000 * percentile(alone, 99),
        "num_gaps": len(gaps),
        "num_prompts": len(prompts),
        "num_unanswered_prompts": sum(not each.token_times for each in prompts),
        "foreign_cpu_share": max(run.foreign_cpu_share for run in runs),
    }


def _late_percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values some of which are infinite, of what never came: infinite from the first of them on.

    Between two values in proportion; where that would ask for a share of infinity, all of it.
    """
    ordered = sorted(values)
    above = math.ceil((len(ordered) - 1) * percent / 100)
    if math.isinf(ordered[above]):
        return math.inf
    return percentile([min(each, ordered[above]) for each in ordered], percent)


def _answered_seconds(run: Observed) -> float:
    """Return the time in which the prompts were computed: to the end of the window, or to the last first token."""
    firsts = [prompt.token_times[0] for prompt in run.prompts if prompt.token_times]
    return max([run.loaded[1], *firsts]) - run.loaded[0]


def _is_in_time(prompt: Prompt, in_time: InTime) -> bool:
    return prompt.ttft_seconds <= in_time.ttft_seconds and prompt.tpot_seconds <= in_time.itl_seconds


def best_chunk(by_chunk: Mapping[int, Figures], max_ttft_seconds: float) -> int:
    """Return the chunk size with the smallest p99 ITL of those that hold the TTFT target at the median.

    Where none does: the one with the smallest TTFT.
    """
    holding = [chunk for chunk, found in by_chunk.items() if found["ttft_s.p50"] <= max_ttft_seconds]
    if holding:
        return min(holding, key=lambda chunk: by_chunk[chunk]["itl_ms.p99"])
    return min(by_chunk, key=lambda chunk: by_chunk[chunk]["ttft_s.p50"])


def target(found: Figures) -> Target:
    """Return what the issue asks of the disaggregated system."""
    ratio = found["itl_p99_to_p50"]
    text = f"disaggregated: p99 ITL / p50 = {ratio:.2f}, at most {MAX_P99_TO_P50:g}"
    return Target(text, ratio <= MAX_P99_TO_P50)


def all_figures(by_system: Mapping[str, Figures]) -> Figures:
    """Return flat figures, and what disaggregation wins and costs beside each other system."""
    found: Figures = {}
    for name, each in by_system.items():
        found |= flat(name, {key: value for key, value in each.items() if math.isfinite(value)})
    apart = by_system.get("disaggregated")
    for name, other in by_system.items():
        if apart is not None and name != "disaggregated":
            for key in ("itl_ms.p50", "itl_ms.p99", "itl_ms.max", "ttft_s.p50", "stream_tokens_per_second"):
                if math.isfinite(other[key]) and math.isfinite(apart[key]):
                    found |= flat("ratio", {f"disaggregated_to_{name}.{key}": apart[key] / other[key]})
    return found


def sheets(title: str, by_system: Mapping[str, Figures]) -> list[Sheet]:
    """Return latencies and throughputs, one row per system."""
    return [
        _sheet(f"{title}: latencies, ITL in ms; alone = the streams without prompts", _LATENCIES, by_system),
        _sheet(f"{title}: throughput and goodput", _THROUGHPUTS, by_system),
    ]


def _sheet(title: str, columns: Mapping[str, str], by_system: Mapping[str, Figures]) -> Sheet:
    rows: Rows = [(name, *(_cell(key, each[key]) for key in columns)) for name, each in by_system.items()]
    return Sheet(title, ("", *columns.values()), rows)


def price_sheet(by_system: Mapping[str, Figures]) -> Sheet | None:
    """Return what disaggregation wins and what it costs, as plain ratios; None without it."""
    apart = by_system.get("disaggregated")
    if apart is None or len(by_system) < 2:
        return None
    keys = ("itl_ms.p99", "itl_ms.max", "itl_ms.p50", "ttft_s.p50", "stream_tokens_per_second")
    others = [name for name in by_system if name != "disaggregated"]
    rows: Rows = [(name, *(_times(apart[key], by_system[name][key]) for key in keys)) for name in others]
    head = ("disaggregated, in times of", "ITL p99", "ITL max", "ITL p50", "TTFT p50", "decode tok/s")
    return Sheet("what it wins (ITL p99 and max) and what it costs (ITL p50, TTFT)", head, rows)


def _times(one: float, other: float) -> str:
    return f"{one / other:.2f}" if math.isfinite(one) and math.isfinite(other) else "-"


def _cell(key: str, value: float) -> str:
    if key == "foreign_cpu_share":
        return f"{value:.0%}{'!' if value > MAX_FOREIGN_CPU_SHARE else ''}"
    return f"{value:.0f}" if key.startswith("num_") else f"{value:.2f}" if value < 10 else f"{value:.1f}"
