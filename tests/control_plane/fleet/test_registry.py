"""The registry registers, suspects, forgets and replaces workers in time. The clock is the test's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from control_plane.fleet.registry import RELAYED_SECONDS, Worker, WorkerRegistry
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import StaleIncarnation

READY, DRAINING, LOADING = pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_LOADING


class Harness:
    """A registry, a clock, and a record of what listeners were called with."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.diary: list[str] = []
        self.registry.listen(self.changed)

    def changed(self, worker: Worker, is_here: bool) -> None:
        what = "gone" if not is_here else "suspected" if worker.is_suspected else pb.WorkerState.Name(worker.load.state)
        self.diary.append(f"{worker.incarnation} {what.removeprefix('WORKER_STATE_').lower()}")

    def pass_time(self, seconds: float) -> None:
        """Let time pass in a running process, which sweeps four times a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.registry.sweep()

    def register(
        self, incarnation: str, state: pb.WorkerState.ValueType = READY, version: int = 0, **fields: Any
    ) -> None:
        info = pb.WorkerInfo(worker_id="w", incarnation=incarnation, role=pb.WORKER_ROLE_DECODE, **fields)
        self.registry.register(info, pb.LoadReport(state=state), version)

    def beat(
        self, incarnation: str, state: pb.WorkerState.ValueType = READY, kv_address: str = "", version: int = 0
    ) -> bool:
        beat = cp.HeartbeatRequest(
            worker_id="w",
            incarnation=incarnation,
            load=pb.LoadReport(state=state),
            kv_address=kv_address,
            info_version=version,
        )
        return self.registry.heartbeat(beat)


def test_a_heartbeat_before_the_first_sweep_after_a_pause_is_of_now_and_not_of_later() -> None:
    harness = Harness()
    harness.register("one")
    harness.pass_time(1.0)
    harness.now += 141.0  # the process stood still; then the loop took in the heartbeat first, and swept after that
    assert harness.beat("one")
    harness.registry.sweep()
    assert harness.diary == ["one ready"]
    harness.pass_time(5.25)
    assert harness.diary == ["one ready", "one suspected", "one gone"], "it is not alive for two minutes more"


def test_a_report_that_waited_at_the_host_does_not_undo_a_later_one() -> None:
    harness = Harness()
    harness.register("one", host_id="h")
    late, direct = (
        cp.HeartbeatRequest(worker_id="w", incarnation="one", load=pb.LoadReport(state=state), number=number)
        for number, state in ((7, READY), (8, DRAINING))
    )
    assert harness.registry.heartbeat(direct)
    assert harness.registry.relayed(late, "h")
    worker = harness.registry.get("w")
    assert worker is not None and worker.load.state == DRAINING and harness.registry.is_relayed(worker)
    # A release whose reports come in order says no number.
    assert harness.beat("one", READY)
    assert harness.diary == ["one ready", "one draining", "one ready"]


def test_a_heartbeat_changes_what_it_reports_and_nothing_else() -> None:
    harness = Harness()
    card = pb.ModelCard(model_id="m", fingerprint=pb.Fingerprint(weights_digest="w"), block_size=16)
    harness.register("one", LOADING, version=3, host_id="h", card=card)
    before = harness.registry.get("w")
    assert before is not None and not before.is_usable and before.figures.num_running == 0
    harness.now = 1.5
    load = pb.LoadReport(state=READY, num_running=7)
    beat = cp.HeartbeatRequest(worker_id="w", incarnation="one", load=load, kv_address="h:2", info_version=3, number=4)
    assert harness.registry.relayed(beat, "h")
    after = harness.registry.get("w")
    assert after is not None
    expected = replace(
        before, info=after.info, load=load, last_heartbeat=1.5, number=4, relayed_at=1.5, is_suspected=False
    )
    assert {each.name: getattr(after, each.name) for each in fields(Worker)} == {
        each.name: getattr(expected, each.name) for each in fields(Worker)
    }
    assert after.info.kv_address == "h:2" == after.figures.kv_address and before.info.kv_address == ""
    assert after.is_usable and after.is_ready and after.figures.num_running == 7
    assert (after.worker_id, after.incarnation, after.role) == ("w", "one", pb.WORKER_ROLE_DECODE)
    assert not before.is_usable and before.figures.num_running == 0, "a snapshot never changes"


def test_after_a_pause_a_host_that_was_heard_before_counts_as_heard() -> None:
    harness = Harness()
    harness.register("one", host_id="h")
    harness.registry.relayed(cp.HeartbeatRequest(worker_id="w", incarnation="one", number=1), "h")
    harness.now += 60.0
    harness.registry.sweep()
    worker = harness.registry.get("w")
    assert worker is not None and harness.registry.is_relayed(worker)
    harness.now += RELAYED_SECONDS
    assert not harness.registry.is_relayed(worker)


def test_silence_makes_a_worker_suspected_and_then_gone() -> None:
    harness = Harness()
    harness.register("one")
    harness.pass_time(3.0)
    assert harness.diary == ["one ready"]
    harness.pass_time(0.25)
    assert harness.diary[1:] == ["one suspected"]
    worker = harness.registry.get("w")
    assert worker is not None and not worker.is_usable
    harness.pass_time(2.0)
    assert harness.diary[2:] == ["one gone"]
    assert harness.registry.workers() == [] and not harness.beat("one")


def test_a_heartbeat_clears_suspicion() -> None:
    harness = Harness()
    harness.register("one")
    harness.pass_time(4.0)
    assert harness.beat("one")
    harness.pass_time(2.5)
    assert harness.diary == ["one ready", "one suspected", "one ready"]


def test_time_in_which_we_ourselves_did_not_run_is_nobodys_silence() -> None:
    harness = Harness()
    harness.register("one")
    harness.now += 60.0  # the gateway's machine slept
    harness.registry.sweep()
    harness.pass_time(2.0)
    assert harness.diary == ["one ready"]
    harness.pass_time(3.25)
    assert harness.diary == ["one ready", "one suspected", "one gone"]


def test_a_new_life_takes_the_place_of_the_old_for_good() -> None:
    harness = Harness()
    harness.register("one")
    harness.register("two")
    assert harness.diary == ["one ready", "one gone", "two ready"]
    with pytest.raises(StaleIncarnation):
        harness.beat("one")
    with pytest.raises(StaleIncarnation, match="--worker-id"):
        harness.register("one")
    harness.registry.deregister("w", "one")
    worker = harness.registry.get("w")
    assert worker is not None and worker.incarnation == "two"


def test_what_comes_late_changes_nothing_and_what_was_missed_is_asked_for() -> None:
    harness = Harness()
    harness.register("one", LOADING, version=0)
    harness.register("one", version=1, kv_address="new")
    harness.register("one", LOADING, version=0)  # a late copy
    assert harness.beat("one", LOADING, version=0), "so is this: no reason to register again"
    worker = harness.registry.get("w")
    assert worker is not None and worker.info.kv_address == "new" and worker.load.state == READY
    assert not harness.beat("one", version=2), "its registration was lost: it is to come again"
    harness.register("one", version=2, kv_address="newer")
    assert harness.beat("one", version=2, kv_address="newer")
    harness.register("two", version=0)
    worker = harness.registry.get("w")
    assert worker is not None and worker.incarnation == "two", "versions are an incarnation's own"


def test_a_worker_that_was_forgotten_registers_again() -> None:
    harness = Harness()
    harness.register("one")
    harness.pass_time(6.0)
    harness.register("one")
    assert harness.diary[-1] == "one ready"


def test_listeners_hear_of_states_and_not_of_figures() -> None:
    harness = Harness()
    harness.register("one", LOADING)
    for state in (LOADING, READY, READY, DRAINING):
        harness.beat("one", state)
    assert harness.diary == ["one loading", "one ready", "one draining"]


def test_a_heartbeat_tells_which_kv_service_a_worker_uses() -> None:
    harness = Harness()
    harness.register("one", kv_address="old")
    before = harness.registry.get("w")
    harness.beat("one", kv_address="new")
    after = harness.registry.get("w")
    assert before is not None and after is not None
    assert (before.info.kv_address, after.info.kv_address) == ("old", "new")  # snapshots do not change


def test_kv_services_are_named_by_host_while_they_can_be_used() -> None:
    harness = Harness()
    for host in "ab":
        info = pb.WorkerInfo(worker_id=f"kv-{host}", incarnation=host, role=pb.WORKER_ROLE_KV, host_id=host)
        harness.registry.register(info, pb.LoadReport(state=READY))
    assert [service.incarnation for service in harness.registry.kv_services("b")] == ["b"]
    harness.pass_time(3.5)
    assert harness.registry.kv_services() == []


def test_of_many_workers_that_fell_silent_a_turn_of_the_loop_takes_a_few() -> None:
    """Each end has listeners and a line of log: 500 of them in one sweep would stop every stream."""
    harness = Harness()
    for number in range(50):
        info = pb.WorkerInfo(worker_id=f"w-{number}", incarnation=f"{number}", role=pb.WORKER_ROLE_DECODE)
        harness.registry.register(info, pb.LoadReport(state=READY))
    harness.diary.clear()

    def sweeps() -> list[int]:
        """Sweep as the gateway does; return how many workers changed in each turn."""
        changes, more = [], True
        while more:
            harness.diary.clear()
            more = harness.registry.sweep()
            changes.append(len(harness.diary))
        return changes

    harness.pass_time(3.0)
    assert harness.diary == []
    harness.now += 0.25
    assert sweeps() == [16, 16, 16, 2]
    assert sweeps() == [0], "suspected once"
    for _ in range(2):
        harness.now += 1.0
        harness.registry.sweep()
    assert sweeps() == [16, 16, 2] and harness.registry.workers() == []


def test_workers_are_found_by_their_role_after_every_change() -> None:
    harness = Harness()
    harness.register("one")
    harness.register("two")
    kv = pb.WorkerInfo(worker_id="kv", incarnation="kv", role=pb.WORKER_ROLE_KV, host_id="h", address="127.0.0.1:1")
    harness.registry.register(kv, pb.LoadReport(state=READY))
    ids = [
        [worker.incarnation for worker in harness.registry.workers(role)]
        for role in (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_KV)
    ]
    assert ids == [["two"], ["kv"]]
    assert [service.worker_id for service in harness.registry.kv_services("h")] == ["kv"]
    changed = pb.WorkerInfo(worker_id="kv", incarnation="kv", role=pb.WORKER_ROLE_PREFILL)
    harness.registry.register(changed, pb.LoadReport(state=READY), 1)
    assert harness.registry.kv_services() == []
    assert [worker.worker_id for worker in harness.registry.workers(pb.WORKER_ROLE_PREFILL)] == ["kv"]
    harness.registry.deregister("kv", "kv")
    harness.registry.deregister("w", "two")
    assert not any(harness.registry.workers(role) for role in pb.WorkerRole.values())


def test_a_model_is_served_while_a_decode_worker_takes_requests_for_it() -> None:
    harness = Harness()
    harness.register("one", LOADING, card=pb.ModelCard(model_id="m"))
    assert not harness.registry.serves("m")
    harness.beat("one", READY)
    assert harness.registry.serves("m") and not harness.registry.serves("other")


def test_kv_services_are_found_by_their_place_while_they_may_be_used() -> None:
    harness = Harness()

    def register(host: str, state: pb.WorkerState.ValueType = READY, has_store: bool = True) -> None:
        info = pb.WorkerInfo(
            worker_id="kv", incarnation="one", role=pb.WORKER_ROLE_KV, host_id=host, address=f"{host}:1"
        )
        load = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1) if has_store else None)
        harness.registry.register(info, pb.LoadReport(state=state, kv_service=load))

    def places() -> tuple[list[str], list[str]]:
        registry = harness.registry
        return [each for each in "ab" if registry.store_of(each)], [
            each for each in "ab" if f"{each}:1" in registry.kv_addresses()
        ]

    assert places() == ([], [])
    register("a")
    assert places() == (["a"], ["a"])
    register("b", has_store=False)
    assert places() == ([], ["b"])
    register("b", DRAINING)
    assert places() == ([], [])
    register("b")
    assert places() == (["b"], ["b"])
    harness.registry.deregister("kv", "one")
    assert places() == ([], [])


@pytest.mark.parametrize("change", [{"host_id": "b"}, {"role": pb.WORKER_ROLE_DECODE}])
def test_who_keeps_something_by_host_or_role_hears_of_a_worker_that_has_another(change: dict[str, Any]) -> None:
    registry = WorkerRegistry(3.0, 5.0)
    heard: list[tuple[str, int, bool]] = []
    registry.listen(lambda worker, is_here: heard.append((worker.info.host_id, worker.role, is_here)))
    info = pb.WorkerInfo(worker_id="w", incarnation="w-1", role=pb.WORKER_ROLE_KV, host_id="a")
    for _ in range(2):
        registry.register(info, pb.LoadReport(state=READY))
    changed = pb.WorkerInfo()
    changed.CopyFrom(info)
    for name, value in change.items():
        setattr(changed, name, value)
    registry.register(changed, pb.LoadReport(state=READY))
    there = ("a", pb.WORKER_ROLE_KV)
    assert heard == [(*there, True), (*there, True), (*there, False), (changed.host_id, changed.role, True)]
    assert (registry.kv_service_of("a") is None) and len(registry.workers()) == 1
