"""Enters what was measured: tables, figures and targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lib.command import Outcome, Sheet, Target
from benchmarks.lib.report import Rows
from benchmarks.overload.arrivals import ACCOUNTS
from benchmarks.overload.judging import Load, acceptance_by_length

MIN_GOODPUT, MIN_MET, MAX_WOULD = 0.9, 0.95, 0.05
MAX_UNFAIR, MAX_OFF_BY_LENGTH = 0.10, 0.20
MAX_REFUSAL_MS, MAX_REFUSAL_CPU_MS = 50.0, 1.0


def enter(outcome: Outcome, loads: Sequence[Load], health_ms: float | None) -> None:
    """Enter all loads; the first one is what the others are compared with.

    `health_ms`: CPU of `GET /healthz`; None: there was no process.
    """
    overloads = [load for load in loads if load.times > 1]
    for load in loads:
        outcome.figures |= _figures(load, loads[0])
    outcome.sheets += [_by_load(loads), _by_account(loads)]
    if any(load.simulated for load in loads):
        outcome.sheets.append(_simulated(loads))
    for load in overloads:
        outcome.targets += _targets(load, loads[0])
    if overloads:
        _enter_lengths(outcome, overloads)
    if overloads and health_ms is not None:
        _enter_refusal_cpu(outcome, loads[0], overloads[-1], health_ms)
    num_failed = sum(load.num_failed for load in loads)
    outcome.figures["num_failed"] = num_failed
    outcome.targets.append(Target(f"{num_failed} requests were neither answered nor refused with 429", not num_failed))


def _figures(load: Load, first: Load) -> dict[str, float]:
    key = f"load_{load.times:g}"
    return {
        f"{key}.asked_per_second": len(load.counted) / load.counted_seconds,
        f"{key}.goodput": load.goodput,
        f"{key}.goodput_of_first": _ratio(load.goodput, first.goodput),
        f"{key}.good_tokens": load.good_tokens,
        f"{key}.good_tokens_of_first": _ratio(load.good_tokens, first.good_tokens),
        f"{key}.refused_share": len(load.refused) / max(1, len(load.counted)),
        f"{key}.late_refusals": load.late_refusals,
        f"{key}.met_share": load.met_share,
        f"{key}.would_share": load.would_share,
        f"{key}.ttft_seconds_p95": load.ttft_p95,
        f"{key}.refusal_ms_p99": load.refusal_ms_p99,
        f"{key}.unfairness": load.unfairness,
        f"{key}.gateway_cpu_seconds": load.cpu_seconds,
        **{f"{key}.share.{account}": part for account, part in load.account_shares.items()},
        **{f"{key}.simulated.{name}": value for name, value in load.simulated.items()},
    }


def _by_load(loads: Sequence[Load]) -> Sheet:
    first = loads[0]
    rows: Rows = [
        (
            f"{load.times:g}",
            f"{len(load.counted) / load.counted_seconds:.1f}",
            f"{load.goodput:.2f} ({_ratio(load.goodput, first.goodput):.3f})",
            f"{load.good_tokens:.0f} ({_ratio(load.good_tokens, first.good_tokens):.3f})",
            f"{len(load.refused) / max(1, len(load.counted)):.1%}",
            f"{load.met_share:.1%}",
            f"{load.would_share:.1%}",
            f"{load.ttft_p95:.2f} s",
            f"{load.refusal_ms_p99:.1f} ms",
            f"{load.late_refusals:.1%}",
        )
        for load in loads
    ]
    head = (
        *("load", "asked/s", "good/s (of the first)", "good tokens/s (of the first)", "refused", "accepted: in budget"),
        *("refused: would be, had all been accepted", "TTFT p95", "refusal p99", "refused after waiting"),
    )
    return Sheet("By load", head, rows)


def _by_account(loads: Sequence[Load]) -> Sheet:
    rows: Rows = []
    for load in loads:
        had, fair = load.account_shares, load.fair_shares
        cells = (f"{had.get(each, 0.0):.1%} of {fair.get(each, 0.0):.1%}" for each in ACCOUNTS)
        rows.append((f"{load.times:g}", *cells, f"{load.unfairness:.1%}"))
    return Sheet("Workers' time by account, of its fair part", ("load", *ACCOUNTS, "farthest off"), rows)


def _simulated(loads: Sequence[Load]) -> Sheet:
    """The simulator's own admission on the same arrivals."""
    rows: Rows = [
        (
            f"{load.times:g}",
            f"{load.simulated['goodput_per_second']:.2f}",
            f"{load.simulated['refused_share']:.1%}",
            f"{load.simulated['accepted_met_share']:.1%}",
            f"{load.simulated['refused_would_share']:.1%}",
        )
        for load in loads
        if load.simulated
    ]
    head = ("load", "good/s", "refused", "accepted: in budget", "refused: would be, had this one alone been let wait")
    return Sheet("The same arrivals in the simulator", head, rows)


def _targets(load: Load, first: Load) -> list[Target]:
    at = f"at {load.times:g} times"
    targets = [
        Target(
            f"{at} goodput is {ratio:.3f} of that at the first load in {what}, at least {MIN_GOODPUT:g}",
            ratio >= MIN_GOODPUT,
        )
        for what, ratio in (
            ("requests", _ratio(load.goodput, first.goodput)),
            ("tokens", _ratio(load.good_tokens, first.good_tokens)),
        )
    ]
    return [
        *targets,
        Target(
            f"{at} {load.met_share:.1%} of the accepted met both budgets, at least {MIN_MET:.0%}",
            load.met_share >= MIN_MET,
        ),
        Target(
            f"{at} {load.would_share:.1%} of the refused would have, had all been accepted, at most {MAX_WOULD:.0%}",
            load.would_share <= MAX_WOULD,
        ),
        Target(
            f"{at} each account is within {load.unfairness:.1%} of its fair part, at most {MAX_UNFAIR:.0%}",
            load.unfairness <= MAX_UNFAIR,
        ),
        Target(
            f"{at} a refusal takes {load.refusal_ms_p99:.1f} ms (p99), at most {MAX_REFUSAL_MS:g}",
            load.refusal_ms_p99 <= MAX_REFUSAL_MS,
        ),
    ]


def _enter_lengths(outcome: Outcome, overloads: Sequence[Load]) -> None:
    """Acceptance by length, of all overloads together: one alone accepts too few to tell."""
    parts = acceptance_by_length(overloads)
    farthest = max((abs(part - 1) for _, part, _ in parts), default=0.0)
    rows: Rows = [(f"up to {longest}", f"{part:.3f}", str(num)) for longest, part, num in parts]
    head = ("prompt and answer, tokens", "accepted, of the fair part", "accepted")
    outcome.sheets.append(Sheet("Acceptance by decile of length, all overloads", head, rows))
    outcome.figures["farthest_by_length"] = farthest
    outcome.targets.append(
        Target(
            f"acceptance of each decile of length is within {farthest:.1%} of its fair part, at most "
            f"{MAX_OFF_BY_LENGTH:.0%}",
            farthest <= MAX_OFF_BY_LENGTH,
        )
    )


def _enter_refusal_cpu(outcome: Outcome, first: Load, last: Load, health_ms: float) -> None:
    """The gateways' processor time at the largest load, less that at the first, for each refusal more."""
    num_more = sum(each.status == 429 for each in last.asked) - sum(each.status == 429 for each in first.asked)
    if num_more <= 0:
        return
    refusal_ms = 1000 * (last.cpu_seconds - first.cpu_seconds) / num_more
    outcome.figures |= {"refusal_cpu_ms": refusal_ms, "health_cpu_ms": health_ms}
    outcome.targets.append(
        Target(
            f"a refusal takes {refusal_ms:.2f} ms of a gateway's processor, {refusal_ms - health_ms:.2f} more than GET "
            f"/healthz, at most {MAX_REFUSAL_CPU_MS:g}",
            refusal_ms - health_ms <= MAX_REFUSAL_CPU_MS,
        )
    )


def _ratio(figure: float, first: float) -> float:
    return figure / first if first else 0.0
