"""Judges the figures of a full run on a card, and chooses those that are shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_kit.part import Result

MIN_SPEED = 0.8
"""Of transformers' continuous batching."""
MAX_TOP_P = 1.3
"""Times a greedy step."""
_SHOWN = {
    "card": ("name", "driver", "total_bytes"),
    "limits": ("memory_read_gb_per_second", "matmul_tflops_bfloat16", "launch_us", "to_card_pinned_gb_per_second"),
    "parity_demo": ("float32.equal_share", "auto.equal_share"),
    "parity_random": ("auto.equal_share", "auto.largest_margin"),
    "determinism": ("numerics_class",),
    "decode": ("batch_1.ratio", "batch_32.ratio"),
    "prefill": ("ratio",),
    "sampling": ("ratio",),
    "overlap": ("ratio", "equal_tokens_share"),
    "hand_over": ("alone.ttft_ms", "alone.gap_ms", "alone.step_ms"),
    "host_memory": ("prefill.host_bytes", "decode.host_bytes", "bound_bytes"),
    "kill": ("num_requests", "num_failed", "recovered_seconds"),
    "hand_over_ring": ("alone.ttft_ms", "alone.gap_ms"),
    "hand_over_device": ("alone.ttft_ms", "alone.gap_ms"),
}


@dataclass(frozen=True)
class Bar:
    """One bar of the kit. None: the part that it is about has no figure for it."""

    text: str
    part: str
    is_met: bool | None


def bars(results: Mapping[str, Result]) -> list[Bar]:
    """Judge what was measured; a bar whose figure is missing is not met, and says so by None."""

    def figure(part: str, path: str) -> Any:
        return at(results[part].figures, path) if part in results else None

    def bar(text: str, part: str, path: str, *, low: float | None = None, high: float | None = None) -> Bar:
        value = figure(part, path)
        if value is None:
            return Bar(f"{text}: not measured", part, None)
        is_met = (low is None or value >= low) and (high is None or value <= high)
        limit = f"at least {low:g}" if low is not None else f"at most {high:g}"
        return Bar(f"{text} = {value:.4g}, {limit}", part, is_met)

    speed = "of transformers' continuous batching"
    found = [
        bar(f"decode at batch {batch}, {speed}", "decode", f"batch_{batch}.ratio", low=MIN_SPEED) for batch in (1, 32)
    ]
    found.append(bar(f"prefill, {speed}", "prefill", "ratio", low=MIN_SPEED))
    found.append(bar("a step with top-p, of a greedy one", "sampling", "ratio", high=MAX_TOP_P))
    for role in ("prefill", "decode"):
        most = figure("host_memory", "bound_bytes")
        text = f"host bytes of the {role} worker, weights + 2 GiB"
        found.append(bar(text, "host_memory", f"{role}.host_bytes", high=0 if most is None else most))
    found.append(bar("answers that failed when prefill was killed", "kill", "num_failed", high=0))
    return found


def at(figures: Mapping[str, Any], path: str) -> Any:
    """Return the figure of a dotted path; None if there is none."""
    found: Any = figures
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def headline(part: str, result: Result) -> str:
    """Return the few figures of a part that are shown while the kit runs, or why there are none."""
    if result.state != "done":
        return result.reason.partition("\n")[0]
    pairs = [(path, at(result.figures, path)) for path in _SHOWN.get(part, ())]
    return ", ".join(f"{path} {_short(value)}" for path, value in pairs if value is not None)


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
