"""Compares two checkouts where prefill is what lacks: long prompts and short answers, by turns.

Two gateways, two prefill workers, a decode worker and a KV service, all real, with a small model. Engines compute
prompts at a pace (`pace/sitecustomize.py`), so the capacity is known and other load on the machine changes little.
Prefill has the last core, everything else the first. Our prefill workers grant time (`--prompt-grants`), those of the
other checkout do not: with our own folder as the other one, that alone is compared. Each turn starts the processes of
one side; both get the same arrivals.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.gateway.processes import Processes
from benchmarks.lib.command import Outcome, Progress, Sheet
from benchmarks.lib.random_model import made, words
from benchmarks.lib.report import Rows
from benchmarks.lib.served import ROOT
from benchmarks.lib.stats import percentile
from benchmarks.overload.arrivals import ACCOUNTS, Sizes, arrivals
from benchmarks.overload.asking import Address, ask
from benchmarks.overload.judging import Load
from benchmarks.overload.systems import FIRST_CORE, LAST_CORE, body_of, wait_ready
from control_plane.simulator.outcome import Budgets
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest
from tests.ports import free_ports

_PACE = Path(__file__).parent / "pace"
_MODEL, _NUM_GATEWAYS = "one", 2
_SIZES = Sizes((200, 1800), (2, 6))
_PACE_TOKENS, _NUM_PREFILL = 5000, 2
"""Of prompts, per second and prefill worker."""
_CAPACITY = _NUM_PREFILL * _PACE_TOKENS / _SIZES.mean_prompt
"""Requests per second."""
_MAX_MODEL_LEN = 4096
_WORKER = WorkerProfile(0.001, 0.0, 0.0, 1.0, 0.0, 1 << 20, 1024)
_PROFILE = FleetProfile(_NUM_PREFILL, 1, _WORKER, _WORKER)
"""Accounts are compared by the tokens of their prompts."""
_WORDS = words(2000)


@dataclass(frozen=True)
class Size:
    loads: tuple[float, ...]
    num_turns: int
    """Of each side."""
    seconds: float
    warm_seconds: float
    wait_seconds: float
    """The budget until the first token."""
    token_seconds: float = 1.0


FULL, QUICK = Size((0.8, 2.0), 3, 36.0, 8.0, 10.0), Size((2.0,), 1, 8.0, 2.0, 3.0)


def prompt_conditions(*, is_quick: bool) -> dict[str, str]:
    """Return what is measured, in words."""
    size = QUICK if is_quick else FULL
    return {
        "fleet": f"{_NUM_GATEWAYS} gateways; {_NUM_PREFILL} prefill workers, a decode worker, of a small model",
        "pace": f"{_PACE_TOKENS:,} prompt tokens a second and prefill worker; {_CAPACITY:g} requests a second in all",
        "placement": "prefill workers have one core; gateways, decode, the KV service and the client the other",
        "lengths": f"prompts of {_SIZES.prompt[0]} to {_SIZES.prompt[1]} tokens, no two alike; answers of "
        f"{_SIZES.answer[0]} to {_SIZES.answer[1]}",
        "budgets": f"{size.wait_seconds:g} s until the first token, {size.token_seconds:g} s for each token after it",
        "loads": f"{size.seconds:g} s each, of which {size.warm_seconds:g} do not count; nobody comes again",
    }


async def compare_prompts(other: Path, is_quick: bool, outcome: Outcome, folder: Path, progress: Progress) -> None:
    """Measure this checkout and `other` by turns, and enter figures and ratios; a quick run measures only this one."""
    size = QUICK if is_quick else FULL
    sides: Mapping[str, Path | None] = {"new": None} if is_quick else {"old": other, "new": None}
    found: dict[str, list[list[Load]]] = {side: [] for side in sides}
    for turn in range(size.num_turns):
        for side in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            async with _started(sides[side], size, folder.with_name(f"prompts-{turn}-{side}")) as addresses:
                progress(f"turn {turn + 1}, {side}")
                found[side].append([await _measured(addresses, times, size) for times in size.loads])
    enter(outcome, size, found)


@asynccontextmanager
async def _started(checkout: Path | None, size: Size, folder: Path) -> AsyncIterator[list[Address]]:
    """Start everything of a checkout; yield where the gateways answer once they serve the model."""
    checkpoint, first, last = made(folder.parent, "long"), {FIRST_CORE}, {LAST_CORE}
    paths = (_PACE, checkout or ROOT, (checkout or ROOT) / "protos" / "gen")
    code = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TANDEM_PACE_TOKENS": str(_PACE_TOKENS),
        "TANDEM_PREFILL_PROMPT_GRANTS": str(checkout is None).lower(),
        "OMP_NUM_THREADS": "1",
    }
    model = (
        *("--model", str(checkpoint), "--served-model-name", _MODEL, "--dtype", "float32", "--num-threads", "1"),
        *("--max-model-len", str(_MAX_MODEL_LEN), "--speculation", "off", "--kv-memory-bytes", str(256 << 20)),
    )
    with Processes(folder, [FIRST_CORE], first) as processes:
        ports = free_ports(_NUM_GATEWAYS)
        budgets = f"*={size.wait_seconds:g}/{size.token_seconds:g}"
        for port in ports:
            flags = ("--listen", f"127.0.0.1:{port}", "--local-prefill", "never", "--budgets", budgets)
            processes.gateway(*flags, checkout=checkout)
        start = functools.partial(processes.service, variables=code)
        pinned = (*model, "--cpus", str(LAST_CORE))
        services = [start("prefill_svc", f"prefill-{number}", *pinned, cores=last) for number in range(_NUM_PREFILL)]
        services.append(start("kv_transfer_svc", "kv", cores=first))
        services.append(start("decode_svc", "decode", *model, "--cpus", str(FIRST_CORE), cores=first))
        await wait_ready(ports, (_MODEL,))
        yield [("127.0.0.1", port) for port in ports]
        for service in services:
            service.check()  # without prefill workers decode would compute the prompts


async def _measured(addresses: Sequence[Address], times: float, size: Size) -> Load:
    coming = arrivals(times * _CAPACITY, size.seconds, _SIZES, (_MODEL,), len(addresses), f"prompts {times}")
    asked = await ask(addresses, coming, _body)
    return Load(times, size.seconds, size.warm_seconds, asked, Budgets(size.wait_seconds, size.token_seconds), _PROFILE)


def _body(request: TraceRequest) -> dict[str, object]:
    rng = random.Random(f"{request.account} {request.number} {request.arrival}")
    return body_of("".join(f" {word}" for word in rng.choices(_WORDS, k=request.num_prompt_tokens)), request)


def enter(outcome: Outcome, size: Size, found: Mapping[str, Sequence[Sequence[Load]]]) -> None:
    """Enter the figures of each turn and side, and the ratios of turns: below 1, the new side is worse."""
    rows: Rows = []
    for place, times in enumerate(size.loads):
        by_side = {side: [_figures(turn[place]) for turn in turns] for side, turns in found.items()}
        for side, loads in found.items():
            together = _waits([each[place] for each in loads])
            outcome.figures |= {f"load_{times:g}.{side}.all.{name}": each for name, each in together.items()}
            p50, p99 = (f"{each:.3f} s" for each in together.values())
            outcome.notes.append(f"at {times:g} times the capacity, {side}, all turns: TTFT p50 {p50}, p99 {p99}")
        for side, turns in by_side.items():
            for number, figures in enumerate(turns):
                outcome.figures |= {f"load_{times:g}.{side}.{number}.{name}": each for name, each in figures.items()}
                cells = (f"{each:.3f}" for each in figures.values())
                rows.append((f"{times:g}", side, str(number + 1), *cells))
        if len(by_side) == 2 and size.num_turns > 1:
            for name in ("goodput", "ttft_p50", "ttft_p99"):
                old, new = ([each[name] for each in by_side[side]] for side in ("old", "new"))
                ratio = median_of_ratios(old, new, is_time=name != "goodput")
                outcome.figures[f"load_{times:g}.ratio.{name}"] = ratio.value
                outcome.notes.append(
                    f"at {times:g} times the capacity, {name}: "
                    f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), {ratio.verdict}"
                )
    head = ("load", "side", "turn", "good/s", "TTFT p50, s", "TTFT p99, s", "refused", "in budget", "failed", *ACCOUNTS)
    outcome.sheets.append(Sheet("Prompts by turns; parts of accounts by prompt tokens", head, rows))


def _waits(loads: Sequence[Load]) -> dict[str, float]:
    """Return percentiles of the times to the first token of some loads together."""
    waits = [each.ttft_seconds for load in loads for each in load.accepted if each.ttft_seconds is not None]
    return {f"ttft_p{percent}": percentile(waits, percent) for percent in (50, 99)}


def _figures(load: Load) -> dict[str, float]:
    return {
        "goodput": load.goodput,
        **_waits([load]),
        "refused_share": len(load.refused) / max(1, len(load.counted)),
        "met_share": load.met_share,
        "num_failed": load.num_failed,
        **{f"share.{account}": load.account_shares.get(account, 0.0) for account in ACCOUNTS},
    }
