"""Measures the gap between token one and token two, of two workers beside one.

python -m benchmarks.handover [--quick] [--json FILE] [--markdown FILE] [--shapes 0.1b,0.5b]

    gap             token two - token one, as the client sees it
    decode step     the gaps after it: median of the same answers
    gap - step      what the hand-over adds; 0 in an aggregated worker, but for noise
    KV share        of the time to first token, the part in which prefill waits for the KV service: `kv.lookup`, which
                    asks the store for the prompt's beginning. Nothing else is on the way to token one: reserving and
                    sealing the handle, and decode's watch and pulls, go on beside prefill's computation; publishing
                    blocks comes after it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

from benchmarks.lib.arrangements import Arrangement, Workload, beside_prefill, one_core_each
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.measuring import Measured, Sample, measure_model
from benchmarks.lib.random_model import made
from benchmarks.lib.stats import Answer, Figures, flat, percentile

MAX_ADDED_MS = 5.0
MAX_KV_SHARE = 0.02
_NUM_OUTPUT_TOKENS = 16
_ROUNDS = {
    "0.1b": {32: 40, 128: 40, 512: 24, 2048: 12},
    "0.5b": {32: 20, 128: 16, 512: 10, 2048: 6},
}
"""Requests to each arrangement, by shape and length of the prompt."""
_QUICK_ROUNDS = {"tiny": {32: 8, 512: 8}}
_COLUMNS = ("gap p50", "gap p99", "decode step", "gap - step", "TTFT", "KV share")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("handover", __doc__, "a tiny shape, few requests: does it still work?")
    options_of.add_argument(
        "--shapes", default="", metavar="NAME,...", help=f"of {', '.join(_ROUNDS)}; all if not given"
    )
    options = options_of.parse_args(arguments)
    if unknown := sorted(set(filter(None, options.shapes.split(","))) - set(_ROUNDS)):
        raise SystemExit(f"no such shape: {', '.join(unknown)}; there are {', '.join(_ROUNDS)}")
    conditions = {
        "requests": f"greedy, one at a time, {_NUM_OUTPUT_TOKENS} tokens each; random words, so no prefix is shared; "
        "no speculation; the prompt cache is looked up and filled all the same; spans exported over OTLP",
        "disaggregated": "one core and one thread for prefill, one for decode; --local-prefill never",
        "aggregated": "one core and one thread, the one that decode has there; no KV service",
        "all else": "client, gateway, KV service and workers' fronts on prefill's core: what carries a token would "
        "else run on decode's core, in its first step (taskset -c 0 tandem up, with TANDEM_DECODE_CPUS=1)",
        "numbers": "float32 arithmetic, weights in the checkpoint's bfloat16",
    }
    chosen = options.shapes.split(",") if options.shapes else list(_ROUNDS)
    rounds = _QUICK_ROUNDS if options.quick else {shape: _ROUNDS[shape] for shape in chosen}

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        for shape, by_length in rounds.items():
            await _measure_shape(shape, list(_workloads(by_length)), folder, progress, outcome)

    return run("handover", options, conditions, measure)


def _workloads(by_length: dict[int, int]) -> Iterator[Workload]:
    for num_tokens, num_rounds in by_length.items():
        yield Workload(num_tokens, _NUM_OUTPUT_TOKENS, 1, num_rounds, num_warm_ups=1 if num_tokens > 1000 else 3)


async def _measure_shape(
    shape: str, workloads: list[Workload], folder: Path, progress: Progress, outcome: Outcome
) -> None:
    model = made(folder, shape)
    place = folder / f"run-{shape}"
    place.mkdir()
    sides = one_core_each()
    with beside_prefill():
        await _measure_sides(model, shape, sides, workloads, place, progress, outcome)


async def _measure_sides(
    model: Path,
    shape: str,
    sides: list[Arrangement],
    workloads: list[Workload],
    place: Path,
    progress: Progress,
    outcome: Outcome,
) -> None:
    measuring = measure_model(
        model, ("--model", str(model)), sides, workloads, place, lambda line: progress(f"{shape}: {line}")
    )
    async with aclosing(measuring):
        async for measured in measuring:
            add(outcome, shape, measured)


# -------------------------------------------------------------------------------------------------- pure from here on


def add(outcome: Outcome, shape: str, measured: Measured) -> None:
    """Enter one workload's table, figures and targets."""
    by_side = {name: side_figures(sample) for name, sample in measured.samples.items()}
    apart, together = by_side["disaggregated"], by_side["aggregated"]
    num_tokens = measured.workload.num_prompt_tokens
    prefix = f"{shape.replace('.', '_')}.p{num_tokens}"
    for name, figures in by_side.items():
        outcome.figures |= flat(f"{prefix}.{name}", figures)
    outcome.figures |= flat(
        prefix,
        {
            "ratio.gap_to_aggregated": apart["gap_ms.p50"] / together["gap_ms.p50"],
            "ratio.ttft_to_aggregated": apart["ttft_ms.p50"] / together["ttft_ms.p50"],
            "foreign_cpu_share": measured.foreign_cpu_share,
        },
    )
    title = f"random Llama {shape}, {num_tokens} prompt tokens, {measured.workload.num_rounds} requests each; ms"
    outcome.sheets.append(Sheet(title, ("", *_COLUMNS), [_row(name, figures) for name, figures in by_side.items()]))
    if shape in _ROUNDS:  # of a tiny one, everything but computing is most
        outcome.targets += targets(f"{shape}, {num_tokens} tokens", apart)


def targets(what: str, apart: Figures) -> list[Target]:
    """Return what the issue asks for, of one disaggregated workload."""
    added, share = apart["gap_less_step_ms"], apart["kv_share_of_ttft"]
    return [
        Target(f"{what}: gap - decode step = {added:.1f} ms, at most {MAX_ADDED_MS:g} ms", added <= MAX_ADDED_MS),
        Target(f"{what}: KV service's share of TTFT = {share:.2%}, at most {MAX_KV_SHARE:.0%}", share <= MAX_KV_SHARE),
    ]


def side_figures(sample: Sample) -> Figures:
    """Return what one arrangement's answers and traces come to. Raises RuntimeError for answers that cannot count."""
    check(sample.answers)
    gaps = [answer.gaps_seconds[0] for answer in sample.answers]
    step = percentile(list(itertools.chain.from_iterable(answer.gaps_seconds[1:] for answer in sample.answers)), 50)
    ttfts = [answer.ttft_seconds for answer in sample.answers]
    waits = [trace.seconds("kv.lookup") for trace in sample.traces]
    in_ms = {
        "gap_ms.p50": percentile(gaps, 50),
        "gap_ms.p99": percentile(gaps, 99),
        "decode_step_ms": step,
        "gap_less_step_ms": percentile(gaps, 50) - step,
        "ttft_ms.p50": percentile(ttfts, 50),
        "kv_wait_ms.p50": percentile(waits, 50),
    }
    figures = {name: 1000 * seconds for name, seconds in in_ms.items()}
    return {**figures, "kv_share_of_ttft": sum(waits) / sum(ttfts), "num_requests": len(sample.answers)}


def check(answers: Sequence[Answer]) -> None:
    """Raise RuntimeError unless each token came by itself and nothing was cached."""
    if merged := sum(not answer.is_token_by_token for answer in answers):
        raise RuntimeError(f"{merged} of {len(answers)} answers did not come token by token: no gaps to measure")
    if cached := sum(answer.num_cached_tokens for answer in answers):
        raise RuntimeError(f"{cached} prompt tokens were cached; prompts that share no prefix are wanted")


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    names = ("gap_ms.p50", "gap_ms.p99", "decode_step_ms", "gap_less_step_ms", "ttft_ms.p50")
    return (name, *(f"{figures[each]:.1f}" for each in names), f"{figures['kv_share_of_ttft']:.2%}")


if __name__ == "__main__":
    sys.exit(main())
