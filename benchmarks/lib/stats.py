"""Computes statistics from the timings of many requests. Pure: timings and spans in, flat figures out.

    TTFT           first text - sent                     hand-over gap  token two - token one
    ITL            each token - the one before           TPOT           (last - first) / (tokens - 1)

A step's share is its span's time in the whole request's time. Steps overlap (slabs move while prefill computes), so
shares need not add up; `uncovered` is the time in which no step at all was under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

STEPS = (
    "tokenize",
    "route",
    "kv.lookup",
    "prefill.queue",
    "prefill.compute",
    "kv.transfer",
    "decode.queue",
    "decode.first_token",
    "decode.stream",
)
PERCENTILES = (50, 95, 99)

Interval = tuple[float, float]
Figures = dict[str, float]


@dataclass(frozen=True)
class Answer:
    """One streamed answer as its client saw it; times in seconds on one clock."""

    trace_id: str
    sent: float
    token_times: tuple[float, ...]
    """When each piece of text came."""
    ended: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def is_token_by_token(self) -> bool:
        """Whether each token brought its own text; half a character waits for its other half."""
        return len(self.token_times) == self.num_output_tokens

    @property
    def ttft_seconds(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps_seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot_seconds(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class Trace:
    """The spans of one request by step, and the span around them all; seconds on the services' clock."""

    whole: Interval
    steps: Mapping[str, Interval] = field(default_factory=dict)

    def seconds(self, step: str) -> float:
        start, end = self.steps.get(step, (0.0, 0.0))
        return end - start

    @property
    def uncovered_seconds(self) -> float:
        start, end = self.whole
        clipped = [(max(start, first), min(end, last)) for first, last in self.steps.values()]
        return (end - start) - covered_seconds(clipped)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, between two of them in proportion (NumPy's default)."""
    if not values:
        raise ValueError("no values, so no percentile; did any request succeed?")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """Return the length of the intervals' union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def latency_figures(answers: Sequence[Answer]) -> Figures:
    """Return p50, p95 and p99 in milliseconds; ITL, gap and TPOT only of answers that came token by token."""
    streams = [answer for answer in answers if answer.is_token_by_token and len(answer.token_times) > 1]
    series = {
        "ttft_ms": [answer.ttft_seconds for answer in answers],
        "itl_ms": [gap for answer in streams for gap in answer.gaps_seconds],
        "hand_over_gap_ms": [answer.gaps_seconds[0] for answer in streams],
        "tpot_ms": [answer.tpot_seconds for answer in streams],
        "request_ms": [answer.ended - answer.sent for answer in answers],
    }
    return {
        f"{name}.p{percent}": 1000 * percentile(values, percent)
        for name, values in series.items()
        for percent in PERCENTILES
    }


def share_figures(traces: Sequence[Trace]) -> Figures:
    """Return each step's median milliseconds and its share of all requests' time."""
    if not traces:
        raise ValueError("no traces came; is OTLP export on?")
    whole = sum(trace.whole[1] - trace.whole[0] for trace in traces)
    seconds = {step: [trace.seconds(step) for trace in traces] for step in STEPS}
    seconds["uncovered"] = [trace.uncovered_seconds for trace in traces]
    medians = {f"step_ms.{step}": 1000 * percentile(values, 50) for step, values in seconds.items()}
    return medians | {f"share.{step}": sum(values) / whole for step, values in seconds.items()}


def count_figures(answers: Sequence[Answer], seconds: float) -> Figures:
    """Return how much there was, and how fast it went together in `seconds` of serving."""
    return {
        "num_requests": len(answers),
        "num_not_token_by_token": sum(not answer.is_token_by_token for answer in answers),
        "num_prompt_tokens": sum(answer.num_prompt_tokens for answer in answers),
        "num_cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        "output_tokens_per_second": sum(answer.num_output_tokens for answer in answers) / seconds,
    }


def ratio_figures(by_arrangement: Mapping[str, Figures]) -> Figures:
    """Return the bare numbers one would quote; of medians."""
    apart = by_arrangement["disaggregated"]
    ratios = {"ratio.hand_over_gap_to_itl": apart["hand_over_gap_ms.p50"] / apart["itl_ms.p50"]}
    for name, figures in by_arrangement.items():
        if name != "disaggregated":
            for what in ("ttft", "itl", "request"):
                ratios[f"ratio.{what}_to_{name}"] = apart[f"{what}_ms.p50"] / figures[f"{what}_ms.p50"]
    return ratios


def flat(prefix: str, figures: Mapping[str, float]) -> Figures:
    """Put a prefix before every name, and leave six digits: more would be noise."""
    return {f"{prefix}.{name}": float(f"{value:.6g}") for name, value in figures.items()}
