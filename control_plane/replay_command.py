"""The command `tandem replay` (`python -m control_plane replay`): what a trace would be like on another fleet.

It needs no gateway and no workers: time is virtual. The answer is JSON on stdout; `tandem replay` shows it as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.simulator.outcome import Budgets
from control_plane.simulator.policies.names import OURS, POLICIES
from control_plane.simulator.profile_files import BadProfile, read_profile
from control_plane.simulator.profiles import FleetProfile, h100_fleet
from control_plane.simulator.replay import Estimate, Replay, compare
from control_plane.simulator.sources import MadeUpAgents, Source, TracePart
from control_plane.simulator.traces import BadTrace, read_trace

AGENTIC = "agentic"
_DEFAULT_REQUESTS = 2000
_MAX_REQUESTS = 1_000_000


def main(argv: Sequence[str]) -> int:
    """Run `replay ...` and return the exit status: 2 for what cannot be replayed."""
    flags = _parser().parse_args(argv)
    try:
        print(json.dumps(_replayed(flags), indent=2))
    except (BadTrace, BadProfile, ValueError, OSError) as error:
        print(f"tandem replay: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem replay",
        description="Replay a trace on a simulated fleet, with Tandem's router and with the rules of others.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"a file in Mooncake's form (of `tandem trace export` too) or Azure's CSV; {AGENTIC}: a made-up one",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        metavar="NAME",
        help=f"may be repeated; one of {', '.join(POLICIES)} [tandem]",
    )
    parser.add_argument("--workers", type=_positive, metavar="N", help="half of them prefill, half decode [16]")
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers; 0: decode computes prompts")
    parser.add_argument("--decode", type=_positive, metavar="N", help="decode workers")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="speeds and memory, as JSON [H100s with an 8 B model, a roofline]"
    )
    parser.add_argument("--load", type=float, metavar="X", help="change the rate: 1.0 is what the fleet can just serve")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="SECONDS", help="move arrivals by up to this [0]")
    parser.add_argument("--requests", type=_positive, metavar="N", help="of each run [the whole trace]")
    parser.add_argument("--gateways", type=_positive, default=1, metavar="N", help="that route without talking [1]")
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="runs of each policy [1]")
    parser.add_argument("--ttft-budget", type=float, default=2.0, metavar="SECONDS", help="for goodput [2]")
    parser.add_argument("--tpot-budget", type=float, default=0.05, metavar="SECONDS", help="for goodput [0.05]")
    parser.add_argument("--warm-up", type=float, default=0.2, metavar="SHARE", help="of requests not counted [0.2]")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= _MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {_MAX_REQUESTS:,}")
    return number


def _replayed(flags: argparse.Namespace) -> dict[str, Any]:
    if flags.load is not None and flags.load <= 0:
        raise ValueError(f"--load {flags.load:g}: a load must be more than 0")
    fleet, budgets = _fleet(flags), Budgets(flags.ttft_budget, flags.tpot_budget)
    replay = Replay(fleet, _source(flags), budgets, flags.load, flags.gateways, flags.warm_up)
    policies = list(dict.fromkeys(flags.policy or ["tandem"]))
    if fleet.models and not {*policies} <= OURS:
        raise ValueError(f"only {', '.join(sorted(OURS))} tell several models apart; the profile names some")
    found = compare(replay, policies, range(flags.seeds))
    return {
        "trace": Path(flags.trace).name,
        "num_prefill": fleet.num_prefill,
        "num_decode": fleet.num_decode,
        "load": flags.load,
        "num_seeds": flags.seeds,
        "policies": {policy: _means(by_name) for policy, by_name in found.items()},
    }


def _means(by_name: Any) -> dict[str, dict[str, float | None]]:
    """Return mean and half width of the interval of each figure; null where there is only one run."""
    estimates = {name: Estimate.of(values) for name, values in by_name.items()}
    return {
        name: {"mean": each.mean, "half": each.half if each.half != float("inf") else None}
        for name, each in estimates.items()
    }


def _fleet(flags: argparse.Namespace) -> FleetProfile:
    num_prefill, num_decode = flags.prefill, flags.decode
    if flags.workers is not None:
        if num_prefill is not None or num_decode is not None:
            raise ValueError("give --workers, or --prefill and --decode")
        num_prefill, num_decode = flags.workers // 2, flags.workers - flags.workers // 2
    if flags.profile is None:
        num_prefill = 8 if num_prefill is None else num_prefill
        return h100_fleet(num_prefill, 8 if num_decode is None else num_decode)
    profile = read_profile(flags.profile)
    return replace(
        profile,
        num_prefill=profile.num_prefill if num_prefill is None else num_prefill,
        num_decode=profile.num_decode if num_decode is None else num_decode,
    )


def _source(flags: argparse.Namespace) -> Source:
    if flags.trace == AGENTIC:
        return MadeUpAgents(flags.requests or _DEFAULT_REQUESTS)
    trace = read_trace(Path(flags.trace), limit=_MAX_REQUESTS)
    if not trace:
        raise BadTrace("the trace has no requests")
    return TracePart(trace, flags.requests, flags.jitter)
