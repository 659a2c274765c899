"""Hands one very long prompt over in five ways, beside four streams, and compares its answers.

python -m benchmarks.long_prompts [--quick] [--kv-first] [--json FILE] [--markdown FILE]

    computed        prompt tokens that decode computed: none, whichever way the KV comes
    copies          most time that imports and loads of KV took for one engine step
    commands        most time between two engine steps for commands: arriving requests, imports
    longest step    of the steps that had an answer in them
    gap             between two tokens of one stream, as its client sees them
    stall           longest time in which the event loop of a KV service did not run, where it was over 20 ms

The first three and the longest step are the engine's own record. Each way has a new decode worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import made
from benchmarks.lib.stats import Figures, flat, percentile
from benchmarks.long_prompts.asking import Answer
from benchmarks.long_prompts.services import Services, Stall
from benchmarks.long_prompts.ways import BLOCK_TOKENS, BYTES_PER_TOKEN, Plan, Walked, Walker

MAX_COPY_MS = 20.0
_MS_COLUMNS = {
    "decode.copy_ms": "copies",
    "decode.commands_ms": "commands",
    "decode.step_ms": "longest step",
    "prefill.copy_ms": "prefill: copies",
    "prefill.copy_cpu_ms": "in CPU time",
    "gap_ms.p50": "gap p50",
    "gap_ms.p99": "p99",
    "gap_ms.max": "max",
    "alone.gap_ms.p50": "alone: p50",
    "alone.gap_ms.p99": "p99",
    "alone.gap_ms.max": "max",
}
_COUNT_COLUMNS = {
    "ttft_s": "TTFT, s",
    "decode.computed": "decode computed",
    "decode.imported_blocks": "decode imported, blocks",
    "prefill.computed": "prefill computed",
    "prefill.cached": "cached",
    "prefill.loaded": "loaded",
    "kv.stall_ms": "KV stall, ms",
    "kv.stall_cpu_ms": "in CPU time",
}
_FULL = Plan(num_tokens=128 << 10, arena_bytes=32 << 20, num_tail_tokens=4096)
_QUICK = Plan(num_tokens=8 << 10, arena_bytes=2 << 20, num_tail_tokens=256, alone_seconds=0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    found = parser("long_prompts", __doc__, "8,192 tokens and an arena of 2 MiB: does it still work?")
    found.add_argument(
        "--kv-first",
        action="store_true",
        help="run the KV services before all else, on all cores, and judge their stalls by the clock; needs the right "
        "to real-time priority",
    )
    options = found.parse_args(arguments)
    plan = _QUICK if options.quick else _FULL
    cores = sorted(os.sched_getaffinity(0))
    cpus = cores[0], cores[-1]
    first_role = "kv" if options.kv_first else ""
    conditions = {
        "model": f"random Llama, 2 layers, 2 KV heads of 32, float32: {BYTES_PER_TOKEN} bytes of KV per token",
        "prompt": f"{plan.num_tokens} random tokens, {plan.kv_bytes >> 20} MiB of KV, {plan.num_answer_tokens} tokens "
        "of answer, greedy, with log probabilities",
        "beside it": "four streams without end on the same decode worker; no speculation",
        "another host": f"a KV service of another host id on loopback, --arena-bytes {plan.arena_bytes}; certificates",
        "cores": f"decode's engine on core {cpus[1]}, all else on core {cpus[0]}",
        "KV services": "real-time priority, on all cores" if options.kv_first else "ordinary priority",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        model = made(folder, "long")
        os.sched_setaffinity(0, {cpus[0]})
        try:
            async with Services(folder, first_role=first_role, cores=cores) as services:
                walker = Walker(services, model, plan, cpus, progress)
                await _measure(walker, plan, outcome, progress, by_clock=options.kv_first)
        finally:
            os.sched_setaffinity(0, cores)

    return run("long_prompts", options, conditions, measure)


async def _measure(walker: Walker, plan: Plan, outcome: Outcome, progress: Progress, *, by_clock: bool) -> None:
    by_way: dict[str, Figures] = {}
    expected, tail = await walker.together()
    enter_tail(outcome, expected, tail, plan)
    try:
        async for name, walked in walker.ways():
            by_way[name] = figures(walked)
            outcome.targets += targets(name, walked, expected, plan, by_clock=by_clock)
            outcome.notes += [
                f"{name}: the event loop of {service} stood still for {1000 * stall.seconds:.0f} ms, of which it "
                f"computed {1000 * stall.cpu_seconds:.0f} ms in a turn: {stall.where}"
                for service, stall in walked.stalls.items()
                if stall.where
            ]
            progress(f"{name}: {by_way[name]}")
    finally:
        for name, found in by_way.items():
            outcome.figures |= flat(name, found)
        outcome.sheets.append(sheet("Where the tokens were computed", _COUNT_COLUMNS, by_way))
        outcome.sheets.append(
            sheet("Longest times of the engine, and gaps of the four streams; ms", _MS_COLUMNS, by_way)
        )


# -------------------------------------------------------------------------------------------------- pure from here on


def figures(walked: Walked) -> Figures:
    """Return what one way comes to."""
    decode, prefill = walked.decode, walked.prefill
    return {
        "ttft_s": walked.answer.token_times[0] - walked.answer.sent,
        "decode.computed": decode["prompt_tokens_computed"],
        "decode.imported_blocks": decode["blocks_imported"],
        "decode.copy_ms": 1000 * decode["longest_copy_seconds"],
        "decode.commands_ms": 1000 * decode["longest_commands_seconds"],
        "decode.step_ms": 1000 * decode["longest_answer_step_seconds"],
        "prefill.computed": prefill["prompt_tokens_computed"],
        "prefill.cached": prefill["prompt_tokens_cached"],
        "prefill.loaded": prefill["prompt_tokens_loaded"],
        "prefill.copy_ms": 1000 * prefill["longest_copy_seconds"],
        "prefill.copy_cpu_ms": 1000 * prefill["longest_copy_cpu_seconds"],
        "kv.pulled_bytes": sum(counters["bytes_pulled"] for counters in walked.kv.values()),
        "kv.disk_hits": sum(counters.get("disk_hits", 0.0) for counters in walked.kv.values()),
        "kv.stall_ms": _stall(walked, "kv-").seconds * 1000,
        "kv.stall_cpu_ms": _stall(walked, "kv-").cpu_seconds * 1000,
        "gateway.stall_cpu_ms": _stall(walked, "gateway").cpu_seconds * 1000,
        **_gaps("gap_ms", walked.gaps),
        **_gaps("alone.gap_ms", walked.alone),
    }


def targets(name: str, walked: Walked, expected: Answer, plan: Plan, *, by_clock: bool = False) -> list[Target]:
    """Return what is asked of one way, and that it was this way. `by_clock`: stalls of KV services count in full."""
    found = figures(walked)
    num_cached = plan.num_blocks * BLOCK_TOKENS
    came = {
        "cold": ("prefill.computed", plan.num_tokens),
        "pool": ("prefill.cached", num_cached),
        "host": ("kv.pulled_bytes", plan.kv_bytes),
        "store": ("prefill.loaded", num_cached),
        "disk": ("kv.disk_hits", plan.num_blocks),
    }
    key, least = came[name]
    # Decode's engine has a core of its own. All others share one, and wait for it: there, processor time counts.
    longest = max(found["decode.copy_ms"], found["decode.commands_ms"], found["prefill.copy_cpu_ms"])
    computed, most = found["decode.computed"], f"at most {MAX_COPY_MS:g} ms"
    wanted = [
        Target(f"{name}: {key} = {found[key]:.0f}, at least {least}", found[key] >= least),
        Target(f"{name}: decode computed {computed:.0f} prompt tokens, at most 0", computed == 0),
        Target(f"{name}: the answer is that of one worker", walked.answer.content == expected.content),
    ]
    if by_clock:  # the engines wait for KV services that go first, so their steps are not judged
        stood = found["kv.stall_ms"]
        text = f"{name}: the KV service's loop stood still for {stood:.0f} ms at a stretch, {most}"
        return [*wanted, Target(text, stood <= MAX_COPY_MS)]
    stall = found["kv.stall_cpu_ms"]
    return [
        *wanted,
        Target(f"{name}: hand-over and load took {longest:.1f} ms of a step, {most}", longest <= MAX_COPY_MS),
        Target(f"{name}: the KV service's loop computed for {stall:.0f} ms at a stretch, {most}", stall <= MAX_COPY_MS),
    ]


def enter_tail(outcome: Outcome, answer: Answer, tail: Walked, plan: Plan) -> None:
    """Enter what the end of a long prompt does to streams of the same worker."""
    decode = tail.decode
    seconds = tail.answer.token_times[0] - tail.answer.sent
    found = {
        "alone.ttft_s": answer.token_times[0] - answer.sent,
        "tail.seconds": seconds,
        "tail.computed": decode["prompt_tokens_computed"],
        "tail.step_ms": 1000 * decode["longest_answer_step_seconds"],
        **_gaps("tail.gap_ms", tail.gaps),
        **_gaps("tail.alone.gap_ms", tail.alone),
    }
    outcome.figures |= flat("together", found)
    head = (
        "prompt alone: TTFT, s",
        "tail: s",
        "tokens",
        "longest step, ms",
        "gap p50, ms",
        "p99",
        "max",
    )
    what = ("alone.ttft_s", "tail.seconds", "tail.computed", "tail.step_ms")
    keys = (*what, "tail.gap_ms.p50", "tail.gap_ms.p99", "tail.gap_ms.max")
    title = (
        f"One aggregated worker: the prompt, then the last {plan.num_tail_tokens} tokens of another beside the streams"
    )
    outcome.sheets.append(Sheet(title, head, [tuple(_cell(found[key]) for key in keys)]))


def sheet(title: str, columns: dict[str, str], by_way: dict[str, Figures]) -> Sheet:
    rows = [(name, *(_cell(found[key]) for key in columns)) for name, found in by_way.items()]
    return Sheet(title, ("", *columns.values()), rows)


def _stall(walked: Walked, prefix: str) -> Stall:
    return max((stall for name, stall in walked.stalls.items() if name.startswith(prefix)), default=Stall())


def _gaps(name: str, gaps: Sequence[float]) -> Figures:
    return {
        f"{name}.p50": 1000 * percentile(gaps, 50),
        f"{name}.p99": 1000 * percentile(gaps, 99),
        f"{name}.max": 1000 * max(gaps),
    }


def _cell(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
