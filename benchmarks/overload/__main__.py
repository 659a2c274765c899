"""Measures goodput, budgets, parts of accounts and refusals at 1, 2, 5 and 20 times the capacity of two models.

    python -m benchmarks.overload [--quick] [--stand-ins] [--gateways-of FOLDER] [--json FILE] [--markdown FILE]
    python -m benchmarks.overload --gateways 1 2 4 [--quick]
    python -m benchmarks.overload --prompts FOLDER [--quick]
    python -m benchmarks.overload --simulated [--quick]

Two gateways and the client have the first core, the workers of two models the last one. The workers are real, with a
small model, and their speed is measured first; with `--stand-ins` they emit tokens at a pace, so the capacity is known.
All loads are asked one after the other, and once more backwards.
Arrivals are random (Poisson, seeded), and nobody comes again. A greedy account asks for 80 % at both gateways, a small
one for 10 % at one of them, and another one for 10 % at both. The same arrivals go through the simulator: what would
have become of the refused, had all been accepted? `--gateways` compares numbers of gateways at 3 times the capacity,
with stand-ins, and kills one. `--simulated` asks only the simulator, with the rates of stand-ins: one gateway at all
loads. `--prompts` compares with another checkout by turns, where prefill is what lacks: a
real prefill worker, long prompts, short answers. `--gateways-of` takes the gateways from another checkout, such as the
commit before.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from benchmarks.gateway.processes import ALL_CORES
from benchmarks.lib.command import Measure, Outcome, Progress, parser, run
from benchmarks.overload.arrivals import ACCOUNTS, arrivals
from benchmarks.overload.asking import ask
from benchmarks.overload.entering import enter
from benchmarks.overload.gateways import compare_gateways, gateway_conditions
from benchmarks.overload.judging import Load, together
from benchmarks.overload.prompts import compare_prompts, prompt_conditions
from benchmarks.overload.simulated import admitted, all_accepted, asked_of
from benchmarks.overload.systems import FIRST_CORE, MODELS, STAND_IN_SIZES, Setup, System, stand_in_profile, started
from control_plane.admission.budgets import Budget
from control_plane.simulator.outcome import Budgets

_NUM_GATEWAYS = 2
_HEALTH_CALLS = 300


@dataclass(frozen=True)
class Size:
    loads: tuple[float, ...]
    seconds: float
    warm_seconds: float
    wait_seconds: float
    """The budget until the first token."""
    token_seconds: float = 0.25
    num_passes: int = 1
    """Through the loads, each second one backwards: a machine that becomes slower or faster does so for all of them."""


FULL = Size((1, 2, 5, 20), 45.0, 12.0, 10.0, num_passes=2)
QUICK = Size((1, 5), 8.0, 2.0, 3.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = _parser().parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    size, is_stand_in = QUICK if options.quick and not options.simulated else FULL, options.stand_ins or options.quick
    seconds = _simulated_seconds(is_quick=options.quick) if options.simulated else size.seconds
    passes = "" if options.simulated else _passes(size)
    conditions = {
        "accounts": "; ".join(
            f"{name} {account.share:.0%} at {'all gateways' if account.gateways is None else 'the first gateway'}"
            for name, account in ACCOUNTS.items()
        ),
        "models": f"{len(MODELS)}, a {'stand-in' if is_stand_in else 'real decode'} worker each, on one core",
        "gateways": f"{_NUM_GATEWAYS}, with the client on one core; SQLite ledgers",
        "budgets": f"{size.wait_seconds:g} s until the first token, {size.token_seconds:g} s for each token after it",
        "loads": f"{seconds:g} s each, of which {size.warm_seconds:g} do not count, {passes}nobody comes again",
    }
    if options.simulated:
        conditions |= {"models": f"{len(MODELS)}, a simulated worker each", "gateways": "one, simulated"}
        measure = functools.partial(_simulate, options.quick)
    elif options.prompts:
        conditions = {"accounts": conditions["accounts"], **prompt_conditions(is_quick=options.quick)}
        measure = functools.partial(compare_prompts, options.prompts.resolve(), options.quick)
    elif options.gateways:
        conditions |= gateway_conditions(options.gateways, is_quick=options.quick)
        measure = functools.partial(compare_gateways, options.gateways, options.quick)
    else:
        measure = functools.partial(_measure, size, is_stand_in, options.gateways_of)
    pinned = functools.partial(_pinned, measure)
    return run("overload", options, conditions, pinned, is_timed=not options.simulated)


def _passes(size: Size) -> str:
    return f"{size.num_passes} times, forwards and backwards; " if size.num_passes > 1 else ""


def _parser() -> argparse.ArgumentParser:
    made = parser("overload", __doc__ or "", "two short loads of stand-ins: does it still work?")
    made.add_argument("--stand-ins", action="store_true", help="workers that compute nothing, at twice the rate")
    made.add_argument("--gateways", type=int, nargs="+", metavar="N", help="compare these numbers of gateways instead")
    made.add_argument("--prompts", type=Path, metavar="FOLDER", help="compare prefill under load with this checkout")
    made.add_argument("--simulated", action="store_true", help="only the simulator, no process")
    made.add_argument("--gateways-of", type=Path, metavar="FOLDER", help="a checkout whose code the gateways run")
    return made


async def _pinned(measure: Measure, outcome: Outcome, folder: Path, progress: Progress) -> None:
    """Measure with this process, the client, on the gateways' core."""
    os.sched_setaffinity(0, {FIRST_CORE})
    try:
        await measure(outcome, folder / "overload", progress)
    finally:
        os.sched_setaffinity(0, ALL_CORES)


async def _measure(
    size: Size, is_stand_in: bool, checkout: Path | None, outcome: Outcome, folder: Path, progress: Progress
) -> None:
    setup = Setup(_NUM_GATEWAYS, size.wait_seconds, size.token_seconds, is_stand_in, checkout)
    async with started(setup, folder, progress) as system:
        health_ms = await _health_cpu_ms(system)
        passes: dict[float, list[Load]] = {times: [] for times in size.loads}
        for number in range(size.num_passes):
            for times in reversed(size.loads) if number % 2 else size.loads:
                passes[times].append(await measured_load(system, times, size, progress, number))
    enter(outcome, [together(loads) for loads in passes.values()], health_ms)


def _simulated_seconds(*, is_quick: bool) -> float:
    return 60.0 if is_quick else 300.0


async def _simulate(is_quick: bool, outcome: Outcome, folder: Path, progress: Progress) -> None:
    """Let the simulator say what stand-ins would do. Its workers grant nothing, so it has one gateway."""
    seconds, size = _simulated_seconds(is_quick=is_quick), FULL
    profile, capacity = stand_in_profile()
    budgets, rules = Budgets(size.wait_seconds, size.token_seconds), Budget(size.wait_seconds, size.token_seconds)
    loads = []
    for times in size.loads:
        progress(f"{times:g} times the capacity")
        coming = arrivals(times * capacity, seconds, STAND_IN_SIZES, MODELS, 1, f"overload {times}")
        asked = asked_of(profile, coming, 1, rules)
        would = all_accepted(profile, coming, 1, budgets)
        loads.append(Load(times, seconds, size.warm_seconds, asked, budgets, profile, would))
    enter(outcome, loads, None)


async def measured_load(system: System, times: float, size: Size, progress: Progress, number: int = 0) -> Load:
    """Ask for so many times the capacity; return once every request has ended, and the simulator has had them too."""
    progress(f"{times:g} times the capacity")
    num_gateways = len(system.addresses)
    seed = f"overload {times} {number}"
    coming = arrivals(times * system.capacity, size.seconds, system.sizes, MODELS, num_gateways, seed)
    before = _cpu_seconds(system)
    asked = await ask(system.addresses, coming, system.body)
    cpu_seconds = _cpu_seconds(system) - before
    budgets, rules = Budgets(size.wait_seconds, size.token_seconds), Budget(size.wait_seconds, size.token_seconds)
    warm_up = size.warm_seconds / size.seconds
    simulated = await asyncio.to_thread(admitted, system.profile, coming, num_gateways, budgets, rules, warm_up)
    would = await asyncio.to_thread(all_accepted, system.profile, coming, num_gateways, budgets)
    return Load(times, size.seconds, size.warm_seconds, asked, budgets, system.profile, would, cpu_seconds, simulated)


def _cpu_seconds(system: System) -> float:
    return sum(gateway.cpu_seconds for gateway in system.gateways)


async def _health_cpu_ms(system: System) -> float:
    """Return the processor time of `GET /healthz`, with a connection for each as refused requests have."""
    host, port = system.addresses[0]
    before, started_at = system.gateways[0].cpu_seconds, time.perf_counter()
    for _ in range(_HEALTH_CALLS):
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(f"http://{host}:{port}/healthz")
    after = system.gateways[0].cpu_seconds
    await asyncio.sleep(time.perf_counter() - started_at)
    idle = system.gateways[0].cpu_seconds - after
    return 1000 * max(0.0, after - before - idle) / _HEALTH_CALLS


if __name__ == "__main__":
    sys.exit(main())
