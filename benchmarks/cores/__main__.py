"""Measures what an engine makes of its cores: under a quota beside an affinity, started by hand beside `tandem up`.

python -m benchmarks.cores [--quick] [--json FILE] [--markdown FILE] [--only quota|by_hand]

    quota      tokens per second of an engine under a quota of one core of two (cgroup v1), over those of an engine
               that has one core by affinity: prefill, and decode. quota_ignored computes with two threads under the
               same quota, as engines did before they read quotas
    by_hand    output tokens per second of gateway, KV service and two workers started by hand (--cpus 0, --cpus 1),
               over those of `tandem up`; both are up at once and get the same requests by turns
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from benchmarks.ab.ratios import MAX_WIDTH, Ratio, median_of_ratios
from benchmarks.cores import quota
from benchmarks.cores.by_hand import ByHand
from benchmarks.cores.quota import Plan, QuotaRefused, Speeds
from benchmarks.lib.arrangements import Workload
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.memory_need import KV_BYTES_PER_WORKER
from benchmarks.lib.prompts import prompts
from benchmarks.lib.report import Rows
from benchmarks.lib.served import Served
from benchmarks.lib.stats import percentile
from benchmarks.lib.streaming import ask, new_client
from tandem_engine.demo import MODEL_ID, checkpoint_path
from tandem_machine.cores import allowed_cores

MIN_QUOTA_RATIO = 0.9
MIN_BY_HAND_RATIO = 0.95
PARTS = ("quota", "by_hand")
_FULL, _QUICK = Plan("S", num_rounds=15, num_steps=20, num_prompts=2), Plan("tiny", 3, 20, 2)
_REQUESTS = Workload(num_prompt_tokens=128, num_output_tokens=64, concurrency=8, num_rounds=40, num_warm_ups=16)
_QUICK_REQUESTS = Workload(num_prompt_tokens=128, num_output_tokens=16, concurrency=4, num_rounds=3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("cores", __doc__, "a tiny shape, few turns: does it still work?")
    options_of.add_argument("--only", choices=PARTS, help="measure this part alone")
    options = options_of.parse_args(arguments)
    cores = allowed_cores()
    if len(cores) < 2:
        raise SystemExit("two cores are needed, and this process may use one; give it another")
    plan, workload = (_QUICK, _QUICK_REQUESTS) if options.quick else (_FULL, _REQUESTS)
    conditions = {
        "requests": f"quota: random Llama {plan.shape} in bfloat16, prompts of {quota.PROMPT_TOKENS} tokens, batch "
        f"{quota.BATCH}; by hand: the built-in model, {workload.num_prompt_tokens} prompt tokens, "
        f"{workload.num_output_tokens} output tokens, {workload.concurrency} at a time, greedy",
        "turns": f"quota: {plan.num_rounds} of each side, by hand: {workload.num_rounds}; the order changes each turn",
        "ratios": "median of the turns' ratios, with its 95 % interval",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        if options.only in (None, "quota"):
            try:
                add_quota(outcome, await quota.measure(plan, cores, folder, progress))
            except QuotaRefused as error:
                outcome.notes.append(f"the quota was not measured: {error}")
        if options.only in (None, "by_hand"):
            add_by_hand(outcome, await _by_hand(workload, cores, folder, progress))

    return run("cores", options, conditions, measure)


async def _by_hand(
    workload: Workload, cores: Sequence[int], folder: Path, progress: Progress
) -> dict[str, list[float]]:
    """Return the output tokens per second of each turn, by side."""
    environment = {
        "TANDEM_PREFILL_KV_MEMORY_BYTES": str(KV_BYTES_PER_WORKER),
        "TANDEM_DECODE_KV_MEMORY_BYTES": str(KV_BYTES_PER_WORKER),
        # The idle side must not probe itself while the other one is measured.
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": "86400",
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": "172800",
    }
    async with AsyncExitStack() as stack:
        progress("starting tandem up")
        up = Served(folder / "up", ("--model", MODEL_ID), environment, ("prefill", "decode", "kv"))
        await stack.enter_async_context(up)
        progress("starting the services by hand")
        by_hand = await stack.enter_async_context(ByHand(folder / "by_hand", MODEL_ID, cores, environment))
        clients: dict[str, tuple[httpx.AsyncClient, str]] = {
            "up": (await stack.enter_async_context(new_client(up.base_url)), up.model),
            "by_hand": (await stack.enter_async_context(new_client(by_hand.base_url)), by_hand.model),
        }
        source = prompts(checkpoint_path(), workload.num_prompt_tokens, seed=workload.seed)
        for client, model in clients.values():
            await _rate(client, model, list(itertools.islice(source, workload.num_warm_ups)), workload)
        found: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(workload.num_rounds):
            batch = list(itertools.islice(source, workload.round_size))
            for name in sorted(clients, reverse=bool(turn % 2)):
                found[name].append(await _rate(*clients[name], batch, workload))
            progress(f"turn {turn + 1}: " + ", ".join(f"{name} {rates[-1]:.0f}" for name, rates in found.items()))
        return found


async def _rate(client: httpx.AsyncClient, model: str, batch: Sequence[str], workload: Workload) -> float:
    """Send a batch with so many requests at a time; return output tokens per second."""
    waiting = iter(batch)

    async def keep_asking() -> int:
        answers = [await ask(client, model, prompt, workload.num_output_tokens) for prompt in waiting]
        return sum(answer.num_output_tokens for answer in answers)

    started = time.perf_counter()
    counts = await asyncio.gather(*(keep_asking() for _ in range(workload.concurrency)))
    return sum(counts) / (time.perf_counter() - started)


# -------------------------------------------------------------------------------------------------- pure from here on


def add_quota(outcome: Outcome, speeds: Mapping[str, Speeds]) -> None:
    """Enter the table, the figures and the targets of the quota."""
    rows: Rows = []
    for phase in ("prefill", "decode"):
        by_side = {name: getattr(each, phase) for name, each in speeds.items()}
        for name, rates in by_side.items():
            ratio = median_of_ratios(by_side["affinity"], rates, is_time=False)
            rows.append((f"{phase}, {name}", *_cells(rates, ratio)))
            _add_figures(outcome, f"quota.{phase}.{name}", rates, ratio)
            if name == "quota":
                text = f"{phase} under a quota of one core is {ratio.value:.2f} of one core by affinity"
                outcome.targets.append(_target(text, ratio, MIN_QUOTA_RATIO))
    head = ("one core of two", "tokens/s", "ratio to affinity", "95 % interval")
    outcome.sheets.append(Sheet("An engine under a quota (cgroup v1)", head, rows))


def add_by_hand(outcome: Outcome, rates: Mapping[str, Sequence[float]]) -> None:
    """Enter the table, the figures and the target of the services started by hand."""
    rows: Rows = []
    for name, of_side in rates.items():
        ratio = median_of_ratios(rates["up"], of_side, is_time=False)
        rows.append((name, *_cells(of_side, ratio)))
        _add_figures(outcome, f"by_hand.{name}", of_side, ratio)
        if name == "by_hand":
            text = f"two workers by hand on two cores reach {ratio.value:.2f} of `tandem up`"
            outcome.targets.append(_target(text, ratio, MIN_BY_HAND_RATIO))
    head = ("two workers, two cores", "output tokens/s", "ratio to tandem up", "95 % interval")
    outcome.sheets.append(Sheet("Services by hand beside tandem up", head, rows))


def _target(text: str, ratio: Ratio, least: float) -> Target:
    """Compare the median; an interval that is too wide is no result, so the target is missed."""
    if ratio.high - ratio.low > MAX_WIDTH:
        return Target(f"{text}: no result, the interval {ratio.low:.2f} to {ratio.high:.2f} is too wide", is_met=False)
    return Target(f"{text}, at least {least:g}", ratio.value >= least)


def _cells(rates: Sequence[float], ratio: Ratio) -> tuple[str, ...]:
    return f"{percentile(rates, 50):.1f}", f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"


def _add_figures(outcome: Outcome, prefix: str, rates: Sequence[float], ratio: Ratio) -> None:
    outcome.figures |= {
        f"{prefix}.tokens_per_second.p50": percentile(rates, 50),
        f"{prefix}.ratio": ratio.value,
        f"{prefix}.ratio.low": ratio.low,
        f"{prefix}.ratio.high": ratio.high,
    }


if __name__ == "__main__":
    sys.exit(main())
