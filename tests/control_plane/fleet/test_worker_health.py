"""Who is ejected, for how long, and who takes requests meanwhile; time is a number that the tests set."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from control_plane.fleet.attached import Attached
from control_plane.fleet.call_watch import CallWatch
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import WorkerHealth
from tandem.v1 import types_pb2 as pb

MODEL = "tiny"
PREDICTED = 0.1


class World:
    """A fleet of decode workers, their health and a clock."""

    def __init__(self, names: str) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.health = WorkerHealth(self.registry, lambda: self.now)
        self.attached = Attached()
        self.health.ask_links(self.attached)
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        card = pb.ModelCard(model_id=MODEL)
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=pb.WORKER_ROLE_DECODE, card=card)
        self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
        self.attached.add(info.incarnation)

    def worker(self, name: str) -> Worker:
        found = self.registry.get(name)
        assert found is not None
        return found

    def send(self, name: str, predicted: float | None = PREDICTED) -> CallWatch:
        return self.health.watch(self.worker(name), predicted)

    def answer(self, name: str, took: float = PREDICTED, accept: float = 0.001) -> None:
        watch, began = self.send(name), self.now
        self.now = began + accept
        watch.accepted()
        self.now = began + took
        watch.output()

    def peers_answer(self) -> None:
        """Let b and c show what is usual."""
        for name in 3 * "bc":
            self.answer(name)

    def fail(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.send(name).failed("broken")

    def status(self, name: str) -> str:
        return self.health.status(self.worker(name)).state

    def usable(self) -> str:
        return names_of(self.health.usable(self.registry.workers(pb.WORKER_ROLE_DECODE)))

    def stalled(self) -> list[CallWatch]:
        return [watch for watch, _, _ in self.health.stalled()]


def names_of(workers: Iterable[Worker]) -> str:
    return "".join(worker.worker_id for worker in workers)


def test_three_failures_in_a_row_eject_and_a_good_answer_between_them_does_not() -> None:
    world = World("abc")
    world.fail("a", 2)
    world.answer("a")
    world.fail("a", 2)
    assert world.usable() == "abc"
    world.fail("a")
    assert world.usable() == "bc"
    assert world.health.status(world.worker("a")).reason == "broken"


def test_half_of_the_last_calls_failed_is_enough() -> None:
    world = World("ab")
    for _ in range(4):
        world.answer("a")
        world.fail("a")
    assert world.status("a") == "ok"  # ten calls at least
    world.answer("a")
    world.fail("a")
    assert world.status("a") == "ejected"


def test_old_failures_are_forgotten() -> None:
    world = World("ab")
    for _ in range(4):
        world.answer("a")
        world.fail("a")
        world.now += 10.0
    world.answer("a")
    world.fail("a")
    assert world.status("a") == "ok"


def test_an_ejection_is_longer_each_time_and_ends_with_three_good_trials() -> None:
    world = World("ab")
    world.fail("a", 3)
    for seconds in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert world.health.to_try(MODEL) is None
        world.now += seconds
        record = world.health.to_try(MODEL)
        assert record is not None and record.worker.worker_id == "a"
        assert world.status("a") == "probation" and world.usable() == "b"
        world.fail("a")
        assert world.status("a") == "ejected"
    world.now += 8.0
    for _ in range(2):
        world.answer("a")
        assert world.status("a") == "probation" and world.usable() == "b"
    world.answer("a")
    assert world.status("a") == "ok" and world.usable() == "ab"
    world.fail("a", 3)  # 4. soon again: as long as before
    world.now += 7.9
    assert world.status("a") == "ejected"
    world.now += 0.2
    assert world.status("a") == "probation"


def test_who_was_well_for_long_begins_with_one_second_again() -> None:
    world = World("ab")
    world.fail("a", 3)
    world.now += 1.0
    world.fail("a")
    world.now += 2.0
    for _ in range(3):
        world.answer("a")
    world.now += 31.0
    world.fail("a", 3)
    world.now += 1.0
    assert world.status("a") == "probation"


def test_calls_of_before_the_ejection_change_nothing() -> None:
    world = World("ab")
    before = [world.send("a") for _ in range(7)]
    world.fail("a", 3)
    for watch in before[:3]:
        watch.output()
    assert world.status("a") == "ejected"
    world.now += 1.0
    for watch in before[3:]:
        watch.failed("late")
    assert world.status("a") == "probation"


def test_one_call_fails_once() -> None:
    world = World("ab")
    watch = world.send("a")
    for _ in range(5):
        watch.failed("broken")
    assert world.status("a") == "ok"


def test_a_worker_much_slower_than_its_peers_is_ejected() -> None:
    world = World("abc")
    world.peers_answer()
    for _ in range(3):
        world.answer("a", took=10 * PREDICTED)
    assert world.status("a") == "ejected"
    assert "times as long as its peers" in world.health.status(world.worker("a")).reason


def test_calls_that_waited_together_are_slow_once() -> None:
    """A worker stood still for a moment; its caches are worth more than three calls of that moment show."""
    world = World("abc")
    world.peers_answer()

    def stand_still() -> None:
        waiting = [world.send("a") for _ in range(20)]
        world.now += 10 * PREDICTED
        for watch in waiting:
            watch.output()
            world.now += 0.001

    stand_still()
    assert world.status("a") == "ok"
    stand_still()
    stand_still()
    assert world.status("a") == "ejected", "it was slow three times in a row"


def test_calls_that_waited_together_are_slow_each_while_others_are_answered_in_time() -> None:
    world = World("abc")
    world.peers_answer()
    waiting = [world.send("a") for _ in range(10)]
    world.now += 10 * PREDICTED
    for watch in waiting:
        watch.output()
        if world.status("a") == "ok":
            world.answer("a")
    assert world.status("a") == "ejected", "half of its answers were slow"


def test_a_call_that_began_after_a_slow_answer_is_slow_by_itself() -> None:
    """Decode workers have their calls long before prefill has the first token."""
    world = World("abc")
    world.peers_answer()
    sent_early = [world.send("a", predicted=None) for _ in range(3)]
    for watch in sent_early:
        watch.accepted()
        watch.begin(PREDICTED)
        world.now += 10 * PREDICTED
        watch.output()
    assert world.status("a") == "ejected"


def test_a_slow_acceptance_counts_as_a_slow_answer() -> None:
    world = World("abc")
    world.peers_answer()
    for _ in range(3):
        world.answer("a", took=3 * PREDICTED, accept=2 * PREDICTED)
    assert world.status("a") == "ejected"


def test_slow_by_a_few_milliseconds_is_not_slow() -> None:
    world = World("abc")
    for _ in range(3):
        world.answer("b", took=0.004)
        world.answer("c", took=0.004)
    for _ in range(5):
        world.answer("a", took=0.04)
    assert world.status("a") == "ok"


def test_one_peer_alone_is_no_measure() -> None:
    world = World("ab")
    for _ in range(6):
        world.answer("b")
    for _ in range(6):
        world.answer("a", took=10 * PREDICTED)
    assert world.status("a") == "ok"


def test_a_long_prompt_may_take_long() -> None:
    world = World("abc")
    world.peers_answer()
    for _ in range(6):
        watch = world.send("a", predicted=50 * PREDICTED)
        watch.accepted()
        world.now += 50 * PREDICTED
        watch.output()
    assert world.status("a") == "ok"


def test_slowness_never_ejects_more_than_half() -> None:
    world = World("abcde")
    for _ in range(20):
        for name in "de":
            world.answer(name)
        for name in "abc":
            world.answer(name, took=10 * PREDICTED)
    ejected = [name for name in "abcde" if world.status(name) != "ok"]
    assert len(ejected) <= 2 and set(ejected) <= set("abc")


def test_if_all_are_ejected_the_least_bad_ones_take_the_requests() -> None:
    world = World("abc")
    for name in "ab":
        world.fail(name, 3)
    for _ in range(7):
        world.answer("c")
    world.fail("c", 3)
    assert world.usable() == "c"


def test_a_single_worker_is_never_left_out() -> None:
    world = World("a")
    world.fail("a", 20)
    assert world.usable() == "a"


def test_a_detached_worker_gets_nothing_even_if_it_is_the_only_one() -> None:
    world = World("ab")
    world.attached.discard("a-1")
    assert world.usable() == "b" and world.status("a") == "detached"
    world.attached.discard("b-1")
    assert world.usable() == ""


def test_a_broken_stream_counts_once_however_many_calls_it_had() -> None:
    world = World("ab")
    calls = [world.send("a") for _ in range(10)]
    world.attached.discard("a-1")
    world.health.stream_broke(world.worker("a"), len(calls))
    for watch in calls:
        watch.failed("the stream broke")
    world.attached |= {"a-1", "b-1"}
    assert world.status("a") == "ok"
    for _ in range(2):
        world.health.stream_broke(world.worker("a"), 1)
    assert world.status("a") == "ejected"


def test_a_stream_that_ends_without_calls_is_no_failure() -> None:
    world = World("ab")
    world.send("a").output()
    for _ in range(5):
        world.health.stream_broke(world.worker("a"), 0)
    assert world.status("a") == "ok"


def test_others_are_preferred_while_a_call_waits_much_too_long() -> None:
    world = World("abc")
    for _ in range(3):
        for name in "abc":
            world.answer(name)
    watch = world.send("a")
    world.now += 5 * PREDICTED + 0.01
    assert world.usable() == "bc"
    watch.output()
    assert world.usable() == "abc"


def test_a_new_worker_that_does_not_answer_a_submit_is_given_up_as_soon_as_peers_show_what_is_usual() -> None:
    world = World("abc")
    watch = world.send("a")
    world.now += 1.0
    assert world.stalled() == []  # peers have not answered yet
    for name in "bcbcbc":
        world.answer(name)
    assert world.stalled() == [watch]


def test_a_worker_that_has_answered_before_gets_a_second_and_proof_that_its_peers_are_well() -> None:
    world = World("abc")
    for _ in range(3):
        for name in "abc":
            world.answer(name)
    watch = world.send("a")
    watch.accepted()
    world.now += 2.0
    assert world.stalled() == []
    for _ in range(3):
        world.answer("b")
    assert world.stalled() == [watch]


def test_a_worker_that_brings_other_first_tokens_meanwhile_has_not_stalled() -> None:
    world = World("abc")
    watch = world.send("a")
    watch.accepted()
    for name in "bcbcbcaa":
        world.answer(name)
    assert world.stalled() == []


def test_without_peers_that_answer_a_call_waits_ten_seconds_or_eight_times_its_prediction() -> None:
    world = World("ab")
    short, long = world.send("a"), world.send("a", predicted=2.0)
    for watch in (short, long):
        watch.accepted()
    world.now += 10.1
    assert world.stalled() == [short]
    world.now += 6.0
    assert world.stalled() == [short, long]


def test_a_time_in_which_the_gateway_stood_still_is_no_silence_of_its_workers() -> None:
    world = World("ab")
    watch = world.send("a")
    watch.accepted()
    world.now += 2.0
    world.now += 30.0
    world.health.stood_still(30.0)
    assert world.stalled() == []
    world.now += 7.9
    assert world.stalled() == []
    world.now += 0.2
    assert world.stalled() == [watch]
    watch.output()
    assert world.usable() == "ab"


def test_nothing_is_taken_from_the_only_worker() -> None:
    world = World("a")
    world.send("a").accepted()
    world.now += 1000.0
    assert world.stalled() == []


def test_a_decode_worker_is_not_late_while_it_waits_for_prefill() -> None:
    world = World("abc")
    for name in "bcbcbc":
        world.answer(name)
    watch = world.send("a", predicted=None)
    watch.accepted()
    world.now += 100.0
    assert world.stalled() == [] and world.usable() == "abc"
    watch.begin(0.01)
    world.now += 1.0
    assert world.stalled() == [watch]


@pytest.mark.parametrize("outcome", ["output", "failed"])
def test_a_worker_that_is_gone_leaves_nothing(outcome: str) -> None:
    world = World("ab")
    world.fail("a", 3)
    watch = world.send("a")
    gone = world.worker("a")
    world.registry.deregister("a", "a-1")
    if outcome == "output":
        watch.output()
    else:
        for _ in range(3):
            world.health.failed(watch, "late", "failed", is_certain=True)
    assert world.health.to_try(MODEL) is None and world.usable() == "b"
    world.join("a")
    assert world.health.status(gone).state == "ok"
