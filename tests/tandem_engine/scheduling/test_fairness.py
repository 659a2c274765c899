"""Tests that every key gets a fair share, and that no request starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.messages import Refused, RequestOutput, Reserved, StartDecode
from tandem_engine.scheduling.shares import Shares
from tandem_engine.scheduling.waiting_queue import AGEING_SECONDS
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, slab


def one_seat(num_waiting: int = 64, num_seqs: int = 1) -> EngineHarness:
    """Return a harness in which every step takes a second."""
    return EngineHarness(
        256,
        max_num_seqs=num_seqs,
        max_num_waiting=num_waiting,
        max_num_batched_tokens=64,
        step_seconds=lambda work: 1.0,
    )


def order_of_starts(harness: EngineHarness) -> list[str]:
    """Run to the end; return the requests in the order in which they first ran."""
    harness.run()
    harness.assert_nothing_is_left()
    return list(dict.fromkeys(name for step in harness.runner.steps for name, _, _ in step))


# -------------------------------------------------------------------------------------------------------- keys


def test_one_request_does_not_wait_for_two_hundred_of_another_key() -> None:
    harness = one_seat(num_waiting=256)
    for number in range(200):
        harness.add(f"many {number}", [1] * 10, max_tokens=3, fairness_key="many")
    harness.step()
    harness.add("single", [1] * 10, max_tokens=3, fairness_key="single")
    assert order_of_starts(harness)[:2] == ["many 0", "single"]


def test_tokens_are_what_is_shared_not_requests() -> None:
    harness = one_seat()
    for number in range(3):
        harness.add(f"long {number}", [1] * 38, max_tokens=2, fairness_key="long")
    for number in range(12):
        harness.add(f"short {number}", [1] * 8, max_tokens=2, fairness_key="short")
    starts = order_of_starts(harness)
    assert [name.split()[0] for name in starts] == [
        "long",
        *["short"] * 4,
        "long",
        *["short"] * 4,
        "long",
        *["short"] * 4,
    ]
    assert starts[1:5] == [f"short {number}" for number in range(4)]


def test_what_was_found_in_the_cache_is_not_charged() -> None:
    harness = one_seat()
    harness.add("warm", [7] * 33, max_tokens=1, fairness_key="w", root=ROOT)
    harness.run()
    for number in range(3):
        harness.add(f"a{number}", [7] * 33, max_tokens=1, fairness_key="a", root=ROOT)
        harness.add(f"b{number}", [8] * 4, max_tokens=1, fairness_key="b")
    assert order_of_starts(harness)[1:] == ["a0", "b0", "a1", "a2", "b1", "b2"]


def test_a_key_that_was_away_does_not_come_back_with_savings() -> None:
    harness = one_seat()
    harness.add("b early", [1] * 8, max_tokens=2, fairness_key="b")
    harness.run()
    for number in range(6):
        harness.add(f"a{number}", [1] * 8, max_tokens=2, fairness_key="a")
    for _ in range(8):  # a0 to a3
        harness.step()
    for number in range(3):
        harness.add(f"b{number}", [1] * 8, max_tokens=2, fairness_key="b")
    assert order_of_starts(harness)[5:] == ["a4", "b0", "a5", "b1", "b2"]


def test_a_large_request_that_is_next_stays_next_though_its_key_is_served_meanwhile() -> None:
    harness = EngineHarness(num_blocks=8, max_num_seqs=4)
    harness.add("a runs", [1, 2, 3], max_tokens=9, fairness_key="a")
    harness.step()
    harness.add("a large", list(range(28)), max_tokens=1, fairness_key="a")
    harness.step()
    for number in range(3):
        harness.add(f"b{number}", [1], max_tokens=1, fairness_key="b")
    assert order_of_starts(harness) == ["a runs", "a large", "b0", "b1", "b2"]


def test_a_key_leaves_places_in_the_queue_to_others() -> None:
    harness = one_seat(num_waiting=32)
    answers = [harness.add(f"a{number}", [1], max_tokens=1, fairness_key="a")[0] for number in range(32)]
    num_taken = sum(isinstance(answer, Reserved) for answer in answers)
    assert num_taken == 29
    refused = answers[-1]
    assert isinstance(refused, Refused) and refused.reason == "queue_full"
    assert refused.message == (
        "29 of 29 requests here are of 'a' already, the last 3 of 32 places are for others; "
        "try again later or raise --max-num-waiting"
    )
    assert isinstance(harness.add("b", [1], max_tokens=1, fairness_key="b")[0], Reserved)
    assert order_of_starts(harness)[:2] == ["a0", "b"]


def test_decode_requests_beyond_the_seats_get_them_by_key() -> None:
    harness = EngineHarness(64, max_num_seqs=2, max_num_waiting=16)
    for name in ("a0", "a1", "a2", "a3", "b0"):
        harness.add(name, [1, 2, 3], mode="decode", max_tokens=4, fairness_key=name[0])
        harness.core.handle(slab(name, 0, [20]))
        harness.core.handle(StartDecode(name, [1003]))
    assert order_of_starts(harness) == ["a0", "a1", "a2", "b0", "a3"]  # a2 and b0 in one step
    for name in ("a0", "a1", "b0", "a2", "a3"):  # who has a seat keeps it
        steps = [index for index, step in enumerate(harness.runner.steps) if name in {run[0] for run in step}]
        assert len(steps) == 3 == steps[-1] - steps[0] + 1


def test_a_new_key_gets_the_next_seats_of_a_decode_worker_but_not_all() -> None:
    harness = EngineHarness(64, max_num_seqs=2, max_num_waiting=16)

    def start(name: str, max_tokens: int) -> None:
        harness.add(name, [1, 2, 3], mode="decode", max_tokens=max_tokens, fairness_key=name[0])
        harness.core.handle(slab(name, 0, [20]))
        harness.core.handle(StartDecode(name, [1003]))

    for name in ("a0", "a1", "a2", "a3"):
        start(name, 20 if name in ("a0", "a1") else 4)
    for _ in range(18):
        harness.step()
    for name in ("b0", "b1", "b2", "b3"):
        start(name, 4)
    assert order_of_starts(harness) == ["a0", "a1", "b0", "b1", "a2", "a3", "b2", "b3"]


requests = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 6)), min_size=2, max_size=40)


@settings(max_examples=100, deadline=None)
@given(requests=requests, num_seqs=st.integers(1, 4), budget=st.integers(4, 64))
def test_keys_that_both_wait_are_never_further_apart_than_what_runs_and_one_request(
    requests: list[tuple[str, int, int]], num_seqs: int, budget: int
) -> None:
    harness = EngineHarness(256, max_num_seqs=num_seqs, max_num_waiting=64, max_num_batched_tokens=budget)
    costs: dict[str, int] = {}
    waiting: Counter[str] = Counter()
    for number, (key, num_tokens, max_tokens) in enumerate(requests):
        name = f"{key}{number}"
        harness.add(name, [1] * num_tokens, max_tokens=max_tokens, fairness_key=key)
        costs[name] = num_tokens + max_tokens
        waiting[key] += 1
    served: Counter[str] = Counter()
    started: set[str] = set()
    while harness.core.has_work():
        outputs = harness.step().outputs
        for name, _, _ in harness.last_runs():
            if name not in started:
                started.add(name)
                waiting[name[0]] -= 1
        served.update({name: run for name, _, run in harness.last_runs()})
        served.update(output.request_id for output in outputs if output.is_last)  # the last token is not computed
        by_key = {key: sum(count for name, count in served.items() if name[0] == key) for key in "abc" if waiting[key]}
        if by_key:  # served to those that still wait, since all began at once
            bound = (num_seqs + 1) * max(costs.values())
            assert max(by_key.values()) - min(by_key.values()) <= bound
    assert served == costs
    harness.assert_nothing_is_left()


def test_so_many_keys_come_and_go_that_not_all_are_remembered() -> None:
    shares = Shares()
    for number in range(5000):
        shares.arrive(str(number), ())
        shares.choose(str(number))
        shares.charge(str(number), 10)
    assert [shares.served(str(number)) for number in (0, 4999)] == [0.0, 10.0]
    assert len(vars(shares)["_served"]) == 1024


# ----------------------------------------------------------------------------------------------------- classes


def endless(harness: EngineHarness, priority: int, num_steps: int) -> list[RequestOutput]:
    """Step while two requests of each class wait."""
    outputs: list[RequestOutput] = []
    for number in range(num_steps):
        while sum(request.priority == priority for request in harness.core.scheduler._waiting) < 2:
            harness.add(
                f"high {number} {len(outputs)} {len(harness.core.scheduler._waiting)}", [1] * 4, priority=priority
            )
        outputs += harness.step().outputs
    return outputs


def test_a_lower_class_gets_a_turn_now_and_then() -> None:
    harness = one_seat()
    for name in ("low 0", "low 1", "lowest"):
        harness.add(name, [1], max_tokens=1, priority=-2 if name == "lowest" else -1)
    endless(harness, 0, 40)
    starts = {name: index for index, step in reversed([*enumerate(harness.runner.steps)]) for name, _, _ in step}
    # A request of four steps may be in the seat when the turn is due, and one of another class may be first.
    assert starts["low 0"] <= AGEING_SECONDS + 5
    assert starts["lowest"] <= AGEING_SECONDS + 6
    assert starts["low 0"] + AGEING_SECONDS <= starts["low 1"] <= 2 * AGEING_SECONDS + 10
    assert len(harness.runner.steps) == 40


@pytest.mark.parametrize("jump_seconds", [-3600.0, 3600.0])
def test_a_clock_that_is_set_moves_no_turn(jump_seconds: float) -> None:
    harness = one_seat()
    harness.add("low", [1], max_tokens=1, priority=-1)
    endless(harness, 0, 2)
    harness.clock_error_seconds = jump_seconds
    endless(harness, 0, 20)
    start = next(index for index, step in enumerate(harness.runner.steps) if "low" in {run[0] for run in step})
    assert AGEING_SECONDS <= start <= AGEING_SECONDS + 5


@pytest.mark.parametrize("priority", [1, -1])
def test_a_large_request_whose_turn_it_is_is_not_overtaken_when_another_class_is_due(priority: int) -> None:
    harness = EngineHarness(num_blocks=8, max_num_seqs=4, step_seconds=lambda work: 1.0)
    harness.add("runs", [1, 2, 3], max_tokens=16, priority=2)
    harness.step()
    if priority == 1:  # the turn is its class's, for it is the higher one
        harness.add("small", [1], max_tokens=1, priority=0)
        harness.runner.seconds += 1
        harness.add("large", list(range(28)), max_tokens=1, priority=priority)
    else:  # the turn is its class's, for it has waited too long
        harness.add("large", list(range(28)), max_tokens=1, priority=priority)
        for _ in range(7):
            harness.step()
        harness.add("small", [1], max_tokens=1, priority=0)
    assert order_of_starts(harness) == ["runs", "large", "small"]


def test_what_runs_by_its_age_is_not_preempted_for_what_came_later() -> None:
    harness = EngineHarness(num_blocks=6, max_num_seqs=2, step_seconds=lambda work: 1.0)
    harness.add("high", [1, 2, 3, 4], max_tokens=6, priority=1)
    harness.add("high too", [1, 2, 3, 4], max_tokens=6, priority=1)
    harness.add("low", [1, 2, 3, 4], max_tokens=12)
    for _ in range(4):
        harness.step()
    harness.add("later", [1, 2, 3, 4], max_tokens=12, priority=1)
    harness.add("last", [1, 2, 3, 4], max_tokens=12, priority=1)
    outputs = harness.run()
    starts = list(dict.fromkeys(name for step in harness.runner.steps for name, _, _ in step))
    assert starts[:4] == ["high", "high too", "low", "later"]
    assert {o.request_id: o.num_preemptions for o in outputs if o.is_last}["low"] == 0
    assert harness.counter("preemptions") > 0
    harness.assert_nothing_is_left()


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(-2, 2), st.integers(1, 12)), min_size=1, max_size=30),
    num_seqs=st.integers(1, 3),
)
def test_whoever_is_nth_of_its_class_leaves_the_queue_in_bounded_time(
    arrivals: list[tuple[int, int, int]], num_seqs: int
) -> None:
    harness = one_seat(num_waiting=256, num_seqs=num_seqs)
    pending = sorted(enumerate(arrivals), key=lambda item: item[1][0])
    deadline: dict[str, float] = {}
    waits: dict[str, int] = {}
    for step in range(200):
        while pending and pending[0][1][0] <= step:
            number, (_, priority, num_tokens) = pending.pop(0)
            ahead = sum(request.priority == priority for request in harness.core.scheduler._waiting)
            name = f"r{number}"
            harness.add(name, [1] * num_tokens, max_tokens=3, priority=priority)
            # Per turn of its class: ageing, then up to four other classes and itself, a request of three steps each.
            deadline[name] = step + (ahead + 1) * (AGEING_SECONDS + 5 * 3 + 1)
            waits[name] = step
        if harness.core.has_work():
            harness.step()
            for name, _, _ in harness.last_runs():
                waits.pop(name, None)
        else:
            harness.runner.seconds += 1
        assert all(step <= deadline[name] for name in waits)
    assert not waits
    harness.assert_nothing_is_left()
