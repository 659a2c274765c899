"""A simulated gateway lets requests wait, orders and refuses them by the gateway's own admission."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from control_plane.admission.budgets import Budget
from control_plane.admission.model_admission import Bounds, ModelAdmission, Waiter
from control_plane.simulator.admission_line import AdmissionRules
from control_plane.simulator.hindsight import Hindsight
from control_plane.simulator.outcome import Answered, Budgets, Refused
from control_plane.simulator.policies.admitted import AdmittedTandemPolicy
from control_plane.simulator.policies.rivals import RoundRobin
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.traces import TraceRequest
from tests.control_plane.simulator.small_fleet import PLAIN, fleet, request

ANSWER = 50
WORKER = replace(PLAIN, max_num_seqs=8, kv_tokens=20_000, max_num_waiting=64)
CAPACITY = 1 / (ANSWER * 0.018 / 8 + 0.030)
"""Answers per second of one worker: 8 at once, each step 10 ms and 1 ms for each; and 30 ms for a prompt."""
RULES = AdmissionRules(Budget(2.0, 0.1))
BUDGETS = Budgets(2.2, 0.1)


def load(
    times: float, accounts: dict[str, float], seconds: float = 30.0, seed: int = 1, **more: str
) -> list[TraceRequest]:
    """Return random arrivals of so many times the capacity of one worker, by the accounts' shares."""
    rng, now, trace = random.Random(seed), 0.0, list[TraceRequest]()
    while now < seconds:
        now += rng.expovariate(times * CAPACITY)
        (account,) = rng.choices(list(accounts), list(accounts.values()))
        answer = rng.randint(ANSWER // 2, 3 * ANSWER // 2)
        trace.append(request(len(trace), 30, answer, now, max_tokens=200, account=account, **more))
    return trace


def run(
    trace: list[TraceRequest], num_gateways: int = 1, worker_fleet: FleetProfile | None = None
) -> tuple[list[Answered], list[Refused]]:
    profile = worker_fleet or fleet(0, 1, worker=WORKER)
    policies = [AdmittedTandemPolicy(profile, seed, RULES.budget.token_seconds) for seed in range(num_gateways)]
    simulation = Simulation(profile, policies, trace, RULES)
    return simulation.run(), simulation.refused


def tokens_by(answers: list[Answered]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for answer in answers:
        tokens[answer.request.account] += answer.request.num_output_tokens
    return tokens


def test_what_there_is_capacity_for_is_not_refused() -> None:
    answers, refused = run(load(0.7, {"a": 1}))
    assert not refused and all(BUDGETS.are_met(answer) for answer in answers)


@pytest.mark.parametrize("times", [3.0, 20.0])
def test_of_an_overload_as_much_is_served_as_there_is_capacity_for_and_in_time(times: float) -> None:
    trace = load(times, {"greedy": 8, "small": 1, "other": 1})
    answers, refused = run(trace)
    assert len(answers) + len(refused) == len(trace)
    met = [answer for answer in answers if BUDGETS.are_met(answer)]
    assert len(met) >= 0.95 * len(answers)
    assert len(met) >= 0.9 * CAPACITY * 30.0
    assert sum(each.reason == "waited" for each in refused) <= 0.05 * len(refused)
    assert {answer.request.number for answer in answers}.isdisjoint(each.request.number for each in refused)


def test_accounts_that_ask_for_more_than_their_part_get_equal_parts() -> None:
    answers, _ = run(load(10.0, {"greedy": 8, "small": 1, "other": 1}))
    tokens = tokens_by([answer for answer in answers if answer.started_at > 3.0])  # at first there is room for all
    assert all(tokens[account] / tokens.total() == pytest.approx(1 / 3, rel=0.1) for account in tokens)


def test_a_session_goes_on_after_a_refused_turn() -> None:
    trace = load(6.0, {"a": 1}, seconds=10.0)
    _, refused = run(trace)
    follower = replace(request(len(trace), 30, 5), after=refused[0].request.number, gap_seconds=30.0)
    answers, refused_again = run([*trace, follower])
    assert refused_again[0] == refused[0]
    assert answers[-1].request == follower
    assert answers[-1].arrived_at == pytest.approx(refused[0].refused_at + 30.0)


def test_batches_wait_for_the_others_and_no_budget_bounds_them() -> None:
    trace = load(6.0, {"a": 1}, seconds=10.0)
    batch = [
        replace(each, number=len(trace) + place, service_tier="batch", account="b")
        for place, each in enumerate(trace[:20])
    ]
    answers, _ = run([*trace, *batch])
    waits = {tier: [a.ttft_seconds for a in answers if a.request.service_tier == tier] for tier in ("", "batch")}
    assert max(waits["batch"]) > 2.2 >= max(waits[""])


def test_two_models_wait_apart() -> None:
    two = fleet(0, 2, worker=WORKER, models=("m", "n"))
    calm = [replace(each, model="n") for each in load(0.5, {"a": 1})]
    crowd = [replace(each, number=len(calm) + each.number, model="m") for each in load(5.0, {"a": 1})]
    answers, refused = run([*calm, *crowd], worker_fleet=two)
    assert {each.request.model for each in refused} == {"m"}
    assert {(answer.request.model, answer.decode) for answer in answers} == {("m", 0), ("n", 1)}
    with pytest.raises(ValueError, match="which no decode worker has"):
        run([replace(calm[0], model="x")], worker_fleet=two)


def test_each_gateway_admits_for_itself() -> None:
    trace = load(6.0, {"a": 1, "b": 1})
    answers, refused = run(trace, num_gateways=2)
    assert {each.gateway for each in refused} == {0, 1}
    assert sum(BUDGETS.are_met(answer) for answer in answers) >= 0.9 * CAPACITY * 30.0


def test_an_account_that_asks_at_every_gateway_has_no_more_than_one_that_asks_at_one() -> None:
    everywhere = load(10.0, {"a": 3, "b": 1}, seconds=60.0)
    profile = fleet(0, 1, worker=WORKER)
    policies = [AdmittedTandemPolicy(profile, seed, RULES.budget.token_seconds) for seed in range(2)]
    simulation = Simulation(
        profile, policies, everywhere, RULES, lambda asked: 0 if asked.account == "b" else asked.number % 2
    )
    tokens = tokens_by([answer for answer in simulation.run() if answer.started_at > 5.0])
    assert tokens["b"] / tokens.total() == pytest.approx(0.5, abs=0.08), "a quarter, if each counted only its own"


def test_a_policy_that_knows_no_room_admits_nobody() -> None:
    profile = fleet(0, 1)
    with pytest.raises(ValueError, match="RoundRobin knows no room of workers"):
        Simulation(profile, [RoundRobin(profile, 1)], [request()], RULES)


def let_in(room: ModelAdmission, hindsight: Hindsight, waiter: Waiter, number: int, now: float) -> None:
    hindsight.let_in(waiter, number, room, now)
    room.look(waiter, now)
    room.let_in(waiter, 100.0, now)
    room.gone(waiter)


def test_in_hindsight_a_refused_request_has_the_place_of_the_first_one_behind_it() -> None:
    room, hindsight = ModelAdmission(Bounds(100, 100)), Hindsight(10.0)
    before = Waiter("m", "a")
    room.enter(before, 0.0)
    shadow = hindsight.refused(Waiter("m", "a"), room, 1.0)
    batch = hindsight.refused(Waiter("m", "a", -1), room, 1.0)
    other = hindsight.refused(Waiter("m", "b"), room, 1.0)
    behind = Waiter("m", "a")
    room.enter(behind, 2.0)
    let_in(room, hindsight, before, 7, 3.0)
    assert (shadow.number, other.number) == (None, None), "who came before them goes before them"
    let_in(room, hindsight, behind, 8, 4.0)
    assert (shadow.number, shadow.at, other.number) == (8, 4.0, 8)
    assert batch.number is None
    hindsight.let_in(Waiter("m", "c"), 9, room, 5.0)
    assert batch.number == 9, "nobody waits"
    late = hindsight.refused(Waiter("m", "a"), room, 6.0)
    hindsight.let_in(Waiter("m", "c"), 10, room, 16.1)
    assert late.number is None


def test_what_a_refused_request_would_have_had_is_that_of_the_one_in_its_place() -> None:
    _, refused = run(load(4.0, {"a": 1}))
    with_turn = [each for each in refused if each.ttft_seconds is not None]
    assert with_turn and all(each.tpot_seconds is not None for each in with_turn)
    assert all(not BUDGETS.would_be_met(each) for each in refused if each.ttft_seconds is None)
    assert BUDGETS.would_be_met(replace(with_turn[0], ttft_seconds=2.2, tpot_seconds=0.1))
    assert not BUDGETS.would_be_met(replace(with_turn[0], ttft_seconds=2.3, tpot_seconds=0.1))
    assert not BUDGETS.would_be_met(replace(with_turn[0], ttft_seconds=2.2, tpot_seconds=0.2))
