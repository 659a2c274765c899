"""Measures goodput, budgets, shares of accounts and refusals at 1, 2, 5 and 20 times a model's capacity.

    python -m benchmarks.overload [--quick] [--json FILE] [--markdown FILE]

A gateway has a core; a stand-in worker and the client have another. The worker has seats for a few answers of fixed
length and pace, and refuses what is more: so capacity is known, and a load of 20 times it can be asked from one core.
Arrivals are random (Poisson, seeded), and nobody comes again. Three accounts ask: a greedy one for 80 % of the load,
two small ones for 10 % each. An account's fair part is that of max-min fairness: what it asks for, at most an equal
part of what the others leave.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.processes import ALL_CORES, OTHER_CORES, Processes
from benchmarks.gateway.sse_readers import post
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from tandem_engine.demo import MODEL_ID

NUM_SEATS = 8
NUM_TOKENS = 10
TOKEN_SECONDS = 0.1
CAPACITY = NUM_SEATS / (NUM_TOKENS * TOKEN_SECONDS)
"""Answers per second."""
WAIT_SECONDS, NEXT_SECONDS = 3.0, 0.25
"""The model's budgets."""
_FIRST_SECONDS = WAIT_SECONDS + 0.5
"""An accepted request has met its budget if its first token came by then."""
SHARES = {"greedy": 0.8, "small": 0.1, "other": 0.1}
_WARM_SECONDS = 2.0
_MIN_GOODPUT, _MIN_MET, _MAX_UNFAIR, _MAX_REFUSAL_MS = 0.9, 0.95, 0.10, 50.0


@dataclass(frozen=True)
class Size:
    loads: tuple[float, ...]
    seconds: float


FULL, QUICK = Size((1, 2, 5, 20), 40.0), Size((1, 5), 8.0)


@dataclass
class Asked:
    """One request, and what became of it; seconds since the first request of its load."""

    account: str
    at: float
    status: int = 0
    refused_after: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    num_tokens: int = 0

    @property
    def has_met_budgets(self) -> bool:
        if self.first_at is None or self.ended_at is None or self.num_tokens < NUM_TOKENS:
            return False
        per_token = (self.ended_at - self.first_at) / (NUM_TOKENS - 1)
        return self.first_at - self.at <= _FIRST_SECONDS and per_token <= NEXT_SECONDS


@dataclass
class Load:
    """The requests of one load."""

    times: float
    seconds: float
    asked: list[Asked] = field(default_factory=list)

    @property
    def ended(self) -> list[Asked]:
        """Answers that ended in the window that counts."""
        window = _WARM_SECONDS, self.seconds
        return [each for each in self.asked if each.ended_at is not None and window[0] <= each.ended_at <= window[1]]

    @property
    def goodput(self) -> float:
        """Answers per second that met both budgets."""
        return sum(each.has_met_budgets for each in self.ended) / (self.seconds - _WARM_SECONDS)

    @property
    def shares(self) -> dict[str, float]:
        """Each account's part of the tokens."""
        tokens: Counter[str] = Counter()
        for each in self.ended:
            tokens[each.account] += each.num_tokens
        total = max(1, tokens.total())
        return {account: tokens[account] / total for account in SHARES}


def fair_shares(times: float) -> dict[str, float]:
    """Return each account's part of the answers at a load of so many times the capacity."""
    wanted = {account: share * times for account, share in SHARES.items()}
    total = min(1.0, times)
    left, given = total, dict.fromkeys(SHARES, 0.0)
    for index, account in enumerate(sorted(wanted, key=lambda each: wanted[each])):
        given[account] = min(wanted[account], left / (len(wanted) - index))
        left -= given[account]
    return {account: part / total for account, part in given.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = parser("overload", __doc__, "two short loads: does it still work?").parse_args(arguments)
    size = QUICK if options.quick else FULL
    conditions = {
        "model": f"a stand-in worker behind the real protocol: {NUM_SEATS} seats, {NUM_TOKENS} tokens of "
        f"{1000 * TOKEN_SECONDS:g} ms: {CAPACITY:g} answers a second",
        "loads": f"{', '.join(f'{load:g}' for load in size.loads)} times that, {size.seconds:g} s each, of which "
        f"{_WARM_SECONDS:g} do not count; Poisson arrivals, seeded; nobody comes again",
        "accounts": ", ".join(f"{account} {share:.0%}" for account, share in SHARES.items()),
        "budgets": f"{WAIT_SECONDS:g} s of waiting, {NEXT_SECONDS:g} s per token",
        "gateway": "as `python -m control_plane` starts it, with --budgets; SQLite ledger",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, OTHER_CORES)  # the client is this process
        try:
            enter(outcome, await measure_loads(size, folder / "overload", progress))
        finally:
            os.sched_setaffinity(0, ALL_CORES)

    return run("overload", options, conditions, measure)


async def measure_loads(size: Size, folder: Path, progress: Progress) -> list[Load]:
    """Return what became of the requests of each load."""
    loads = []
    with Processes(folder) as processes:
        processes.gateway("--budgets", f"*={WAIT_SECONDS:g}/{NEXT_SECONDS:g}")
        processes.stand_in(TOKEN_SECONDS, "--max-running", str(NUM_SEATS))
        for times in size.loads:
            progress(f"{times:g} times the capacity")
            loads.append(await _ask(processes.address, times, size.seconds))
    return loads


async def _ask(address: tuple[str, int], times: float, seconds: float) -> Load:
    """Ask for so many times the capacity; return once every request has ended."""
    rng = random.Random(f"overload {times}")
    load, started = Load(times, seconds), time.perf_counter()
    accounts, weights = list(SHARES), list(SHARES.values())
    at = 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + rng.expovariate(times * CAPACITY)) < seconds:
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            asked = Asked(rng.choices(accounts, weights)[0], time.perf_counter() - started)
            load.asked.append(asked)
            group.create_task(_run(address, asked, started))
    return load


async def _run(address: tuple[str, int], asked: Asked, started: float) -> None:
    body = {"prompt": "hello", "raw": True, "stream": True, "max_tokens": NUM_TOKENS}
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(post(f"/client/v4/accounts/{asked.account}/ai/run/{MODEL_ID}", body))
        asked.status = int((await reader.readline()).split()[1])
        if asked.status != 200:
            asked.refused_after = time.perf_counter() - started - asked.at
            return
        while b"[DONE]" not in (line := await reader.readline()):
            if not line:
                return
            if line.startswith(b"data: {"):
                asked.num_tokens += b'"response":"' in line and b'"response":""' not in line
                asked.first_at = asked.first_at or time.perf_counter() - started
        asked.ended_at = time.perf_counter() - started
    finally:
        writer.close()


def enter(outcome: Outcome, loads: Sequence[Load]) -> None:
    """Enter figures, tables and targets."""
    rows: Rows = []
    by_account: Rows = []
    first = loads[0].goodput
    for load in loads:
        accepted = [each for each in load.asked if each.status == 200]
        refused = [each.refused_after for each in load.asked if each.refused_after is not None]
        met = sum(each.has_met_budgets for each in accepted) / max(1, len(accepted))
        waits = [each.first_at - each.at for each in accepted if each.first_at is not None]
        ttft = percentile(waits, 95) if waits else 0.0
        refusal_ms = 1000 * percentile(refused, 99) if refused else 0.0
        fair = fair_shares(load.times)
        unfair = max(abs(load.shares[account] / fair[account] - 1) for account in SHARES)
        key = f"load_{load.times:g}"
        outcome.figures |= {
            f"{key}_goodput": load.goodput,
            f"{key}_met_share": met,
            f"{key}_ttft_seconds_p95": ttft,
            f"{key}_refused_share": len(refused) / max(1, len(load.asked)),
            f"{key}_refusal_ms_p99": refusal_ms,
            f"{key}_unfair": unfair,
        }
        rows.append(
            (
                f"{load.times:g}",
                *(f"{len(load.asked) / load.seconds:.1f}", f"{load.goodput:.2f}", f"{load.goodput / first:.3f}"),
                *(f"{len(refused) / max(1, len(load.asked)):.0%}", f"{met:.1%}", f"{ttft:.2f} s"),
                f"{refusal_ms:.1f} ms",
            )
        )
        by_account.append(
            (f"{load.times:g}", *(f"{load.shares[each]:.1%} of {fair[each]:.1%}" for each in SHARES), f"{unfair:.1%}")
        )
        outcome.targets += _targets(load.times, load.goodput / first, met, unfair, refusal_ms)
    head = ("load", "asked per s", "goodput per s", "of the first", "refused", "met budgets", "TTFT p95", "refusal p99")
    outcome.sheets += [
        Sheet("By load", head, rows),
        Sheet("Tokens by account, and their fair part", ("load", *SHARES, "farthest off"), by_account),
    ]


def _targets(times: float, goodput: float, met: float, unfair: float, refusal_ms: float) -> list[Target]:
    if times <= 1:
        return []
    return [
        Target(
            f"goodput at {times:g} times is {goodput:.3f} of that at 1, at least {_MIN_GOODPUT:g}",
            goodput >= _MIN_GOODPUT,
        ),
        Target(
            f"at {times:g} times {met:.1%} of the accepted met both budgets, at least {_MIN_MET:.0%}", met >= _MIN_MET
        ),
        Target(
            f"at {times:g} times each account is within {unfair:.1%} of its fair part, at most {_MAX_UNFAIR:.0%}",
            unfair <= _MAX_UNFAIR,
        ),
        Target(
            f"at {times:g} times a refusal takes {refusal_ms:.1f} ms (p99), at most {_MAX_REFUSAL_MS:g}",
            refusal_ms <= _MAX_REFUSAL_MS,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
