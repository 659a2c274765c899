"""Compares numbers of gateways at 3 times the capacity, with stand-in workers; at the end one gateway is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lib.command import Outcome, Progress, Sheet, Target
from benchmarks.lib.report import Rows
from benchmarks.overload.arrivals import ACCOUNTS, arrivals
from benchmarks.overload.asking import ask
from benchmarks.overload.judging import Load
from benchmarks.overload.systems import MODELS, Setup, System, started
from control_plane.simulator.outcome import Budgets

_TIMES = 3.0
_SETTLE_SECONDS = 2.0
"""After a gateway was killed."""
MAX_OFF = 0.05


@dataclass(frozen=True)
class Size:
    seconds: float
    warm_seconds: float
    after_seconds: float
    """From the death of a gateway until the end."""
    wait_seconds: float
    token_seconds: float = 0.25


FULL, QUICK = Size(80.0, 15.0, 45.0, 10.0), Size(6.0, 2.0, 4.0, 3.0)


@dataclass(frozen=True)
class Compared:
    """What a number of gateways did, and what was done after one of them had died.

    A single one lives on: it shows what the same requests get without a death.
    """

    num_gateways: int
    before: Load
    after: Load


def gateway_conditions(numbers: Sequence[int], *, is_quick: bool) -> dict[str, str]:
    """Return what is measured, in words."""
    size = QUICK if is_quick else FULL
    return {
        "models": f"{len(MODELS)}, a stand-in worker each, on one core: a process that takes time as told, no model",
        "gateways": f"{', '.join(map(str, numbers))}, with the client on one core; SQLite ledgers",
        "budgets": f"{size.wait_seconds:g} s until the first token, {size.token_seconds:g} s for each token after it",
        "loads": f"{_TIMES:g} times the capacity for {size.seconds:g} s, of which {size.warm_seconds:g} do not count; "
        f"{size.after_seconds:g} s more after one of several gateways was killed; nobody comes again; each number of "
        "gateways gets the same requests",
    }


async def compare_gateways(
    numbers: Sequence[int], is_quick: bool, outcome: Outcome, folder: Path, progress: Progress
) -> None:
    """Measure each number of gateways, and enter the figures. The first number is what others are compared with."""
    size = QUICK if is_quick else FULL
    found = []
    for number in numbers:
        progress(f"{number} gateways")
        setup = Setup(number, size.wait_seconds, size.token_seconds, is_stand_in=True)
        async with started(setup, folder.with_name(f"gateways-{number}"), progress) as system:
            found.append(await _compared(system, number, size))
    enter(outcome, found)


async def _compared(system: System, number: int, size: Size) -> Compared:
    seconds = size.seconds + size.after_seconds
    coming = arrivals(_TIMES * system.capacity, seconds, system.sizes, MODELS, number, "gateways")
    if number > 1:
        asyncio.get_running_loop().call_later(size.seconds, system.gateways[-1].signal, signal.SIGKILL)
    asked = await ask(system.addresses, coming, system.body)
    budgets = Budgets(size.wait_seconds, size.token_seconds)
    before = Load(_TIMES, size.seconds, size.warm_seconds, [], budgets, system.profile)
    before = replace(before, asked=[each for each in asked if each.request.arrival < size.seconds])
    settled = size.seconds + _SETTLE_SECONDS
    return Compared(number, before, replace(before, seconds=seconds, warm_seconds=settled, asked=asked))


def enter(outcome: Outcome, found: Sequence[Compared]) -> None:
    """Enter goodput, and the parts of accounts, of each number of gateways."""
    rows: Rows = []
    for compared in found:
        is_first = compared is found[0]
        later = "later" if is_first else "one killed"
        for what, load, first in (
            ("", compared.before, found[0].before),
            (f", {later}", compared.after, found[0].after),
        ):
            name = f"{compared.num_gateways}{what}"
            goodput = load.goodput / first.goodput if first.goodput else 0.0
            had, wanted = load.account_shares, first.account_shares
            off = max(abs(had.get(account, 0.0) / wanted[account] - 1) for account in wanted)
            rows.append(
                (
                    name,
                    f"{load.goodput:.2f} ({goodput:.3f})",
                    *(f"{had.get(account, 0.0):.1%}" for account in ACCOUNTS),
                    f"{off:.1%}",
                    f"{load.met_share:.1%}",
                    f"{load.refusal_ms_p99:.1f} ms",
                )
            )
            key = f"gateways_{compared.num_gateways}{'.' + later.replace(' ', '_') if what else ''}"
            outcome.figures |= {
                f"{key}.goodput": load.goodput,
                f"{key}.goodput_of_first": goodput,
                f"{key}.shares_off": off,
                f"{key}.met_share": load.met_share,
                **{f"{key}.share.{account}": part for account, part in had.items()},
            }
            if not is_first:
                outcome.targets += [
                    Target(
                        f"{name} gateways: goodput is {goodput:.3f} of the first's, within {MAX_OFF:.0%}",
                        abs(goodput - 1) <= MAX_OFF,
                    ),
                    Target(
                        f"{name} gateways: each account's part is within {off:.1%} of the first's, at most "
                        f"{MAX_OFF:.0%}",
                        off <= MAX_OFF,
                    ),
                ]
    head = ("gateways", "good/s (of the first)", *ACCOUNTS, "farthest off", "accepted: in budget", "refusal p99")
    outcome.sheets.append(Sheet(f"At {_TIMES:g} times the capacity; workers' time by account", head, rows))
