"""A simulated fleet serves every request, forgets nothing and repeats itself exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.simulator.engine import Job, Report
from control_plane.simulator.outcome import Budgets, figures
from control_plane.simulator.policies.names import POLICIES
from control_plane.simulator.policies.policy import Placement
from control_plane.simulator.policies.tandem import TandemPolicy
from control_plane.simulator.profiles import h100_fleet
from control_plane.simulator.simulation import Simulation, TooLong
from control_plane.simulator.sources import MadeUpAgents
from control_plane.simulator.traces import TraceRequest
from tests.control_plane.simulator.small_fleet import PLAIN, fleet, request


class Fixed:
    """Always the same placement."""

    report_seconds: float | None = None

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.seen: list[tuple[str, int, float]] = []
        self.reports: list[tuple[int, float]] = []

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        self.seen.append(("place", request.number, round(now, 6)))
        return self.placement

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        self.seen.append(("accepted", request.number, decode))

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        self.seen.append(("pulled" if was_pulled else "read", request.number, worker))

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        self.seen.append(("ended", request.number, decode))

    def report(self, report: Report, now: float) -> None:
        self.reports.append((report.number, now))


def test_a_request_that_is_handed_over_has_its_first_token_from_prefill() -> None:
    policy = Fixed(Placement(0, (1,)))
    slow = fleet(num_hosts=2, hand_over_seconds=0.004, link_bytes_per_second=1e6, gateway_seconds=0.002)
    slow = replace(slow, return_seconds=0.001)
    # Both workers are the first of their role, so on host 0: within a host nothing is slow.
    (answer,) = Simulation(slow, [policy], [request(prompt=50, answer=11)]).run()
    assert policy.seen == [
        ("place", 0, 0.002),
        ("accepted", 0, 1),
        ("read", 0, 0),
        ("pulled", 0, 1),
        ("ended", 0, 1),
    ]
    assert answer.ttft_seconds == pytest.approx(0.002 + 0.060 + 0.001)
    assert answer.hand_over_seconds == pytest.approx(0.004, abs=1e-6)
    assert answer.ended_at == pytest.approx(0.062 + 0.004 + 10 * 0.011 + 0.001)


def test_bytes_between_hosts_take_their_time_after_the_last_step_only() -> None:
    # 250 tokens of 1,000 bytes at 1 MB/s take 250 ms, as long as computing them does, in 3 steps: 280 ms.
    two_hosts = fleet(1, 2, num_hosts=2, link_bytes_per_second=1e6, link_seconds=0.001)
    (answer,) = Simulation(two_hosts, [Fixed(Placement(0, (2,)))], [request(prompt=250)]).run()
    assert answer.hand_over_seconds == pytest.approx(0.100 + 0.001), "100 tokens of the last step, and the latency"


class InTurn(Fixed):
    """Prefill workers 0 and 2, both of host 0, in turn."""

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        return Placement(2 * request.number, self.placement.decodes)


def test_two_hand_overs_into_one_host_share_its_link() -> None:
    two_hosts = fleet(3, 2, num_hosts=2, link_bytes_per_second=1e6)
    trace = [request(number, prompt=100, arrival=0.001 * number) for number in range(2)]
    answers = Simulation(two_hosts, [InTurn(Placement(0, (4,)))], trace).run()
    gaps = [answer.hand_over_seconds for answer in answers]
    assert gaps == [pytest.approx(0.1), pytest.approx(0.199)]


def test_workers_of_one_core_halve_each_others_speed_while_both_compute() -> None:
    shared = fleet(2, 1, cores=(0, 0, 1))
    trace = [request(0, prompt=290, answer=1), request(1, prompt=140, answer=1, arrival=0.120)]

    class InTurnOfTwo(Fixed):
        def place(self, request: TraceRequest, now: float) -> Placement | None:
            return Placement(request.number, self.placement.decodes)

    first, second = Simulation(shared, [InTurnOfTwo(Placement(0, (2,)))], trace).run()
    # The second takes 160 ms alone and begins 200 ms before the first would end: 320 ms at half speed, in which the
    # first does 160 of its 200 ms. The other 40 ms are at full speed.
    assert second.first_token_at == pytest.approx(0.120 + 0.320)
    assert first.first_token_at == pytest.approx(0.440 + 0.040)


def test_a_refused_request_waits_in_order_until_there_is_room() -> None:
    tight = fleet(0, 1, worker=replace(PLAIN, max_num_waiting=1, max_num_seqs=1))
    trace = [request(number, prompt=50, answer=5, arrival=0.001 * number) for number in range(6)]
    answers = Simulation(tight, [Fixed(Placement(None, (0,)))], trace).run()
    begins = [answer.first_token_at for answer in answers]
    assert begins == sorted(begins)
    assert answers[-1].num_attempts > 1
    assert all(answer.prefill is None for answer in answers)


def test_a_follower_waits_for_the_answer_and_its_gap() -> None:
    first, second = request(0, prompt=50, answer=11), request(1, arrival=0.01, after=0, gap_seconds=0.5)
    answers = Simulation(fleet(0, 1), [Fixed(Placement(None, (0,)))], [first, second]).run()
    assert answers[1].arrived_at == pytest.approx(answers[0].ended_at + 0.5)


def test_reports_come_each_second_at_phases_of_their_own() -> None:
    policy = Fixed(Placement(0, (2,)))
    Simulation(fleet(2, 2), [policy], [request(0), request(1, arrival=1.5)]).run()
    of_worker_1 = [round(now, 3) for number, now in policy.reports if number == 1]
    assert of_worker_1[:3] == [0.0, 0.618, 1.618]


def test_a_request_that_fits_nowhere_is_said_before_anything_runs() -> None:
    with pytest.raises(TooLong, match=r"request 0 of the trace needs 10,011 KV tokens, a worker's pool has 10,000"):
        Simulation(fleet(), [Fixed(Placement(0, (1,)))], [request(prompt=10_000)])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_prefill", [0, 3])
def test_every_policy_serves_all_and_leaves_nothing(name: str, num_prefill: int) -> None:
    profile = h100_fleet(num_prefill, 3, workers_per_host=2)
    trace = MadeUpAgents(120).arrivals(profile, 0.9, seed=1)
    policy = POLICIES[name](profile, 7)
    simulation = Simulation(profile, [policy], trace)
    answers = simulation.run()
    assert [answer.request.number for answer in answers] == list(range(120))
    assert all(0 < answer.first_token_at <= answer.ended_at for answer in answers)
    assert all(0 <= answer.num_cached < answer.request.num_prompt_tokens for answer in answers)
    assert all(engine.pool.num_used == pytest.approx(0, abs=0.01) for engine in simulation.engines)
    if isinstance(policy, TandemPolicy):
        assert policy.router.in_flight.total() == 0


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    profile = h100_fleet(4, 4)
    trace = MadeUpAgents(80).arrivals(profile, 1.0, seed=2)

    def run(seed: int) -> list[float]:
        policies = [TandemPolicy(profile, seed + gateway) for gateway in range(2)]
        return [answer.first_token_at for answer in Simulation(profile, policies, trace).run()]

    assert run(1) == run(1) != run(2)


def test_tandem_expects_what_it_finds_while_nothing_is_evicted() -> None:
    profile = h100_fleet(2, 2, workers_per_host=1)
    trace = MadeUpAgents(100).arrivals(profile, 0.3, seed=4)
    answers = Simulation(profile, [TandemPolicy(profile, 1)], trace).run()
    found = figures(answers, Budgets())
    assert found["cached_share"] > 0.5
    assert found["predicted_cached_share"] == pytest.approx(found["cached_share"], abs=0.03)


def test_the_sessions_of_two_gateways_stay_with_theirs() -> None:
    policies = [Fixed(Placement(None, (0,))) for _ in range(2)]
    trace = [request(number, session="ab"[number % 2], arrival=number) for number in range(6)]
    Simulation(fleet(0, 1), policies, trace).run()
    placed = [{number for what, number, _ in policy.seen if what == "place"} for policy in policies]
    assert sorted(map(sorted, placed)) == [[0, 2, 4], [1, 3, 5]]


def test_figures_count_what_is_in_both_budgets_after_the_warm_up() -> None:
    trace = [request(number, prompt=50, answer=5, arrival=number) for number in range(4)]
    trace[3] = replace(trace[3], num_prompt_tokens=5000)
    answers = Simulation(fleet(0, 1), [Fixed(Placement(None, (0,)))], trace).run()
    found = figures(answers, Budgets(ttft_seconds=1.0, tpot_seconds=0.02), warm_up=0.5)
    assert (found["num_requests"], found["goodput_share"]) == (2, 0.5)
    assert found["ttft_ms.p99"] == pytest.approx(5000 + 50 * 10), "50 steps of 100 tokens"
    assert figures(answers, Budgets(1.0, 0.001))["goodput_share"] == 0


def test_who_is_quick_with_the_first_requests_has_no_lower_rate_for_the_others() -> None:
    """Two runs of 10 requests that last 18 s each; in one of them the first half took longer."""
    (answer,) = Simulation(
        fleet(0, 1), [Fixed(Placement(None, (0,)))], [request(0, prompt=50, answer=5, arrival=0)]
    ).run()
    took = answer.ended_at - answer.arrived_at
    for arrivals in ([*range(9), 18.0], [0.0, *range(10, 19)]):
        answers = [replace(answer, arrived_at=at, ended_at=at + took, first_token_at=at + took) for at in arrivals]
        found = figures(answers, Budgets(ttft_seconds=60.0, tpot_seconds=60.0), warm_up=0.5)
        assert found["num_requests"] == 5
        assert found["requests_per_second"] == found["goodput_per_second"] == pytest.approx(10 / 18)
