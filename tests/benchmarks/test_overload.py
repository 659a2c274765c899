"""Goodput, budgets and fair parts follow from what became of the requests, and a short overload is answered in part."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.overload import gateways, prompts
from benchmarks.overload.__main__ import Size, measured_load
from benchmarks.overload.arrivals import ACCOUNTS, Sizes, arrivals, at_once
from benchmarks.overload.asking import Asked
from benchmarks.overload.entering import enter
from benchmarks.overload.judging import Load, acceptance_by_length, together
from benchmarks.overload.pace.sitecustomize import at_pace
from benchmarks.overload.simulated import admitted, all_accepted, seconds_for
from benchmarks.overload.systems import MODELS, STAND_IN_SIZES, Setup, Wave, scaled, started
from control_plane.admission.budgets import Budget
from control_plane.simulator.outcome import Budgets
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest

BUDGETS = Budgets(3.0, 0.25)
WORKER = WorkerProfile(90.0, 0.0, 0.0, 0.001, 0.0, 1 << 20, 1024, max_num_seqs=9)
PROFILE = FleetProfile(0, 2, WORKER, WORKER, models=MODELS)
CAPACITY = 10.0


def request(account: str, at: float, answer: int = 20, number: int = 0) -> TraceRequest:
    return TraceRequest(number, at, 10, answer, model="one", account=account)


def answered(account: str, at: float, ttft: float = 1.0, tpot: float = 0.1, answer: int = 20) -> Asked:
    ended = at + ttft + (answer - 1) * tpot
    return Asked(request(account, at, answer), 0, at, 200, None, at + ttft, ended, answer)


def refused(account: str, at: float, answer: int = 20, number: int = 0) -> Asked:
    return Asked(request(account, at, answer, number), 0, at, 429, 0.010)


def load(times: float, asked: list[Asked], **more: object) -> Load:
    return replace(Load(times, 12.0, 2.0, asked, BUDGETS, PROFILE), **more)  # type: ignore[arg-type]


def test_arrivals_are_the_same_for_a_seed_and_the_small_account_asks_at_one_gateway() -> None:
    first, again, other = (arrivals(50.0, 20.0, Sizes((5, 9), (20, 40)), MODELS, 2, seed) for seed in ("a", "a", "b"))
    assert first == again != other
    assert len(first.requests) == pytest.approx(1000, rel=0.15)
    used = {(each.account, gateway) for each, gateway in zip(first.requests, first.gateways, strict=True)}
    assert used == {("greedy", 0), ("greedy", 1), ("small", 0), ("other", 0), ("other", 1)}
    greedy = sum(each.account == "greedy" for each in first.requests) / len(first.requests)
    assert greedy == pytest.approx(ACCOUNTS["greedy"].share, abs=0.05)


def test_a_load_is_judged_by_goodput_budgets_parts_and_refusals() -> None:
    one = load(1, [answered("greedy", at) for at in range(1, 9)])
    assert one.goodput == pytest.approx(0.8) and one.good_tokens == pytest.approx(16)
    assert (one.met_share, one.would_share, one.refusal_ms_p99) == (1.0, 0.0, 0.0)
    late = load(5, [answered("greedy", 3, ttft=3.1), answered("greedy", 4, tpot=0.3), answered("greedy", 5)])
    assert late.met_share == pytest.approx(1 / 3)
    cut = replace(answered("greedy", 3), ended_at=None)
    assert load(5, [cut]).num_failed == 1 and load(5, [cut]).met_share == 0
    turned = load(5, [refused("greedy", 3.0, number=number) for number in range(4)], would=frozenset({1, 9}))
    assert turned.would_share == 0.25
    assert turned.refusal_ms_p99 == pytest.approx(10)


def test_two_passes_of_a_load_are_judged_as_one_and_what_ends_between_them_does_not_count() -> None:
    asked = [*(answered("greedy", at) for at in (1, 5, 9.5)), refused("greedy", 6.0, number=3)]  # one ends at 13.4 s
    one = load(5, asked, would=frozenset({3}), cpu_seconds=2.0, simulated={"goodput_per_second": 3.0})
    other = load(5, [answered("small", 4), refused("small", 4.0, number=3)], simulated={"goodput_per_second": 5.0})
    both = together([one, other])
    assert len(one.good) == 2 and len(both.good) == 3 and len(both.asked) == 6
    assert both.goodput == pytest.approx((one.goodput + other.goodput) / 2)
    assert both.would_share == 0.5 and both.cpu_seconds == 2.0 and both.simulated == {"goodput_per_second": 4.0}
    assert both.refusal_ms_p99 == pytest.approx(10) and both.ttft_p95 == one.ttft_p95
    assert set(both.account_shares) == {"greedy", "small"}


def test_each_account_has_a_fair_part_of_the_workers_time() -> None:
    fair = load(20, [answered(account, at) for at in (3, 5, 7) for account in ACCOUNTS])
    assert fair.unfairness == pytest.approx(0, abs=1e-9)
    turned = [refused("small", 4.0 + number / 10) for number in range(20)]
    greedy = load(20, [*fair.asked, *turned, answered("greedy", 4)])
    assert greedy.fair_shares["small"] > greedy.account_shares["small"]
    assert greedy.account_shares["greedy"] == pytest.approx(0.4)
    assert greedy.unfairness > 0.1


def test_acceptance_by_length_is_that_of_each_load() -> None:
    def of(answer: int, num_accepted: int, num_refused: int) -> list[Asked]:
        accepted = [answered("a", 3, answer=answer) for _ in range(num_accepted)]
        return [*accepted, *(refused("a", 3, answer=answer) for _ in range(num_refused))]

    even = [load(2, [each for length in range(10, 110, 10) for each in of(length, 5, 5)])]
    even.append(load(20, [each for length in range(10, 110, 10) for each in of(length, 1, 19)]))
    assert [part for _, part, _ in acceptance_by_length(even)] == pytest.approx([1.0] * 10)
    uneven = [load(2, [*of(10, 8, 2), *of(90, 2, 8)])]
    parts = [part for _, part, _ in acceptance_by_length(uneven)]
    assert sum(parts[:5]) / 5 == pytest.approx(1.6) and sum(parts[5:]) / 5 == pytest.approx(0.4)


def test_targets_are_met_or_missed() -> None:
    one = load(1, [answered("greedy", at) for at in range(1, 9)], cpu_seconds=1.0)
    well = load(
        20,
        [
            each
            for account in ACCOUNTS
            for place in range(10)
            for each in (answered(account, 3 + place / 2), refused(account, 4.0), refused(account, 4.0))
        ],
        cpu_seconds=1.06,
    )
    ill = load(
        20, [answered("greedy", 3, ttft=9.0), *(replace(refused("small", 4.0), refused_after=2.0) for _ in range(30))]
    )
    outcomes = []
    for loads in ([one, well], [one, ill]):
        outcomes.append(Outcome())
        enter(outcomes[-1], loads, health_ms=0.5)
    assert [target.is_met for target in outcomes[0].targets].count(False) == 0
    assert outcomes[0].figures["refusal_cpu_ms"] == pytest.approx(1.0)
    assert outcomes[0].figures["load_20.goodput_of_first"] == pytest.approx(3 / 0.8)
    missed = "".join(target.text for target in outcomes[1].targets if not target.is_met)
    assert all(word in missed for word in ("goodput", "met both budgets", "fair part", "a refusal takes 2000.0 ms"))
    assert outcomes[1].figures["load_20.late_refusals"] == 1.0


def test_the_simulator_admits_the_same_arrivals_or_accepts_all() -> None:
    coming = arrivals(4 * CAPACITY, 20.0, STAND_IN_SIZES, MODELS, 2, "test")
    would = all_accepted(PROFILE, coming, 2, BUDGETS)
    assert would and max(would) < len(coming.requests) / 2, "later ones wait behind all that came before"
    found = admitted(PROFILE, coming, 2, BUDGETS, Budget(3.0, 0.25), warm_up=0.2)
    assert found["accepted_met_share"] > 0.9
    assert found["goodput_per_second"] > 0.85 * CAPACITY


def test_the_profile_is_scaled_until_the_simulator_needs_as_long_as_the_workers() -> None:
    eighteen = [request("calibration", 0.0, number=number) for number in range(100, 118)]
    nine = eighteen[::2]
    # Nine seats, and answers of 20 tokens: a step each, and one more, since the first prompt is computed alone.
    assert seconds_for(PROFILE, nine) == pytest.approx(21 * 0.090, rel=0.01)
    assert seconds_for(PROFILE, eighteen) == pytest.approx(41 * 0.090, rel=0.01)
    as_said, hung = Wave(eighteen, seconds_for(PROFILE, eighteen)), Wave(nine, 60.0)
    twice = Wave(eighteen, 2 * as_said.seconds)
    same, capacity = scaled(PROFILE, [as_said, hung, as_said])
    slower, half = scaled(PROFILE, [twice, twice, hung])
    assert same == PROFILE
    assert (slower.decode.step_ms, slower.decode.prompt_ms) == pytest.approx((180.0, 0.002))
    assert slower.prefill == slower.decode and slower.gateway_seconds == 2 * PROFILE.gateway_seconds
    assert seconds_for(slower, eighteen) == pytest.approx(twice.seconds, rel=0.01)
    assert capacity == pytest.approx(9 / (200 * 0.090), rel=0.01), "a core's requests per second, with 200 tokens each"
    assert half == pytest.approx(capacity / 2)


def test_what_is_asked_at_once_has_the_sizes_of_a_load_and_is_dealt_to_models_and_gateways() -> None:
    sizes = Sizes((5, 9), (20, 40))
    coming = at_once(4, sizes, MODELS, 2, 100)
    pairs = list(zip(coming.requests, coming.gateways, strict=True))
    assert [(each.number, each.model, gateway) for each, gateway in pairs[:4]] == [
        *((100, "one", 0), (101, "two", 0)),
        *((102, "one", 1), (103, "two", 1)),
    ]
    assert {each.arrival for each in coming.requests} == {0.0} and len(coming.requests) == 8
    assert all(5 <= each.num_prompt_tokens <= 9 and 20 <= each.num_output_tokens <= 40 for each in coming.requests)


def test_numbers_of_gateways_are_compared_with_the_first() -> None:
    fair = load(3, [answered(account, at) for at in (3, 5, 7) for account in ACCOUNTS])
    uneven = load(3, [answered("greedy", at) for at in (3, 5, 7)])
    outcome = Outcome()
    gateways.enter(
        outcome,
        [gateways.Compared(1, fair, fair), gateways.Compared(2, fair, uneven)],
    )
    assert [target.is_met for target in outcome.targets] == [True, True, False, False]
    assert outcome.figures["gateways_2.one_killed.goodput_of_first"] == pytest.approx(1 / 3)


@pytest.mark.timeout(120)
async def test_a_short_overload_is_answered_in_part(tmp_path: Path) -> None:
    size = Size((8.0,), 4.0, 1.0, 3.0)
    async with started(Setup(2, 3.0, 0.25, is_stand_in=True), tmp_path / "overload", lambda line: None) as system:
        found = await measured_load(system, 8.0, size, lambda line: None)
    assert {each.status for each in found.asked} == {200, 429}
    assert found.num_failed == 0
    assert all(each.num_tokens == each.request.num_output_tokens for each in found.asked if each.status == 200)
    assert {each.request.model for each in found.asked if each.status == 200} == set(MODELS)
    assert found.simulated["refused_share"] > 0.3


def test_prompts_are_compared_turn_by_turn_and_below_one_is_worse() -> None:
    size = prompts.Size((2.0,), 2, 12.0, 2.0, 3.0)

    def turn(num: int, ttft: float) -> list[Load]:
        return [load(2, [*(answered("greedy", 3, ttft) for _ in range(num)), refused("small", 4.0)])]

    outcome = Outcome()
    found = {"old": [turn(10, 1.0), turn(8, 2.0)], "new": [turn(5, 2.0), turn(4, 2.5)]}
    prompts.enter(outcome, size, found)
    figures = outcome.figures
    assert [figures[f"load_2.ratio.{name}"] for name in ("goodput", "ttft_p50", "ttft_p99")] == [0.5, 0.65, 0.65]
    assert figures["load_2.old.1.goodput"] == 0.8 and figures["load_2.new.0.ttft_p99"] == 2.0
    assert figures["load_2.new.1.refused_share"] == pytest.approx(0.2) and figures["load_2.new.1.num_failed"] == 0
    (sheet,) = outcome.sheets
    assert len(sheet.rows) == 4 and all(len(row) == len(sheet.head) for row in sheet.rows)
    assert [note.rpartition(", ")[2] for note in outcome.notes[-3:]] == ["worse", "no result", "no result"]


def test_a_step_with_prompts_takes_its_time_and_one_of_answers_alone_none() -> None:
    ended: list[int] = []
    end = at_pace(lambda core, flight: ended.append(time.monotonic_ns()), 10_000.0)

    def flight(mode: str) -> SimpleNamespace:
        run = SimpleNamespace(num_tokens=200, request=SimpleNamespace(mode=mode))
        return SimpleNamespace(started_ns=time.monotonic_ns(), output=SimpleNamespace(runs=(run, run)))

    step = flight("prefill")
    end(None, step)
    assert ended.pop() - step.started_ns >= 40_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: ended.append(seconds))
        end(None, flight("decode"))
    assert ended[0] == 0.0
