"""A hand-over costs what the pair of hosts, the bytes that are left and the arena say; routes are chosen by that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_figures import Link, figures_of
from control_plane.routing import hand_overs, pair_columns
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.hand_overs import HALF_LIFE_SECONDS, HandOverCost, Shown
from control_plane.routing.pair_columns import PairColumns
from control_plane.routing.router import Router
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tests.control_plane.routing.first_choice import FirstChoice

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
MEGABYTE, GRAIN = 1_000_000, 16
FAR = {"latency_ms": 80.0, "bytes_per_second": 100.0 * MEGABYTE, "num_bytes": 400 * MEGABYTE, "num_transfers": 100}
ALL_AT_ONCE = Shown(1000, 1000, 0.0)


class Harness:
    """Hosts with a KV service each. Workers have 62,500 bytes a token, and read 1,000 tokens a second."""

    def __init__(self, *hosts: str) -> None:
        self.now = 100.0
        self.registry = WorkerRegistry(1e6, 1e7, lambda: self.now)
        self.router = Router(self.registry, rng=FirstChoice(), clock=lambda: self.now)
        self.costs = self.router.costs.hand_overs
        for host in hosts:
            self.kv(host)

    def kv(self, host: str, address: str = "") -> None:
        """Register a host's KV service."""
        info = pb.WorkerInfo(worker_id=f"kv-{host}", incarnation=f"kv-{host}-1", role=pb.WORKER_ROLE_KV)
        info.host_id, info.address = host, address or f"{host}:1"
        self.registry.register(info, self.kv_load())

    def kv_load(self, free: float = 0.0, arena: float = 0.0, **links: Mapping[str, float]) -> pb.LoadReport:
        """Return a report; `links`: what the service has measured, by the other host."""
        found = [pb.KvLink(address=f"{host}:1", **link) for host, link in links.items()]  # type: ignore[arg-type]
        service = pb.KvServiceLoad(links=found, arena_bytes=int(arena), arena_free_bytes=int(free))
        return pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=service)

    def report(self, host: str, load: pb.LoadReport) -> None:
        beat = cp.HeartbeatRequest(worker_id=f"kv-{host}", incarnation=f"kv-{host}-1", load=load)
        assert self.registry.heartbeat(beat)

    def add(self, name: str, role: pb.WorkerRole.ValueType, host: str, **load: Any) -> Worker:
        card = pb.ModelCard(model_id="m", context_length=100_000, block_size=GRAIN, takes_spaces=True)
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=role, card=card, host_id=host)
        info.kv_address = f"{host}:1"
        info.settings["max_num_batched_tokens"] = "400"
        pool = pb.KvPool(num_total_blocks=9000, num_free_blocks=9000, tokens_per_block=GRAIN, bytes_per_block=MEGABYTE)
        counters = {"prompt_tokens_computed": 1000.0, "step_seconds": 1.0, "steps": 100.0}
        self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv=pool, counters=counters, **load))
        worker = self.registry.get(name)
        assert worker is not None
        return worker

    def cost(self, host: str, reader: Worker, shown: Shown = ALL_AT_ONCE, num_own: int = 0) -> HandOverCost:
        return self.costs.cost(shown, host, reader, num_own)

    def column(self, host: str, shown: Shown = ALL_AT_ONCE) -> list[float]:
        """Return the same for all hosts of decode workers, of the table."""
        ((table,),) = [group.decodes for group in self.router._columns.groups(RoutingRequest("m", 1, 1))]
        if table.pairs is None:
            table.pairs = PairColumns(table.on_host, self.costs, lambda: self.now)
        return list(table.pairs.ms(shown, host, 62_500.0))


def test_of_two_kv_services_of_a_host_the_newest_counts_and_then_the_one_that_is_left() -> None:
    """A pod that is started again has another name; the old one is suspected first, and gone some seconds later."""
    harness = Harness("a", "b")
    reader = harness.add("d", DECODE, "b")
    harness.report("b", harness.kv_load(a=FAR))
    slow = harness.cost("a", reader).ms
    old = harness.registry.get("kv-a")
    assert old is not None
    new = pb.WorkerInfo(worker_id="kv-new", incarnation="kv-new-1", role=pb.WORKER_ROLE_KV, host_id="a", address="a:2")
    harness.registry.register(new, harness.kv_load())
    assert harness.cost("a", reader).ms < slow, "nothing is measured to that address"
    harness.registry.register(old.info, harness.kv_load())  # the newest now
    assert harness.cost("a", reader).ms == slow
    harness.registry.deregister("kv-a", "kv-a-1")
    assert harness.cost("a", reader).ms < slow
    harness.registry.deregister("kv-new", "kv-new-1")
    assert harness.costs._addresses == {"b": "b:1"} and harness.costs._host_at == {"b:1": "b"}


def test_the_arena_of_a_host_is_that_of_the_kv_service_that_counts() -> None:
    harness = Harness("a", "b")
    new = pb.WorkerInfo(worker_id="kv-new", incarnation="kv-new-1", role=pb.WORKER_ROLE_KV, host_id="a", address="a:2")
    harness.registry.register(new, harness.kv_load(free=10 * MEGABYTE, arena=100 * MEGABYTE))
    harness.report("a", harness.kv_load(free=50 * MEGABYTE, arena=400 * MEGABYTE))  # the old one, on its way out
    assert harness.costs.arena("a").free_bytes == 10 * MEGABYTE


def test_within_a_host_the_bytes_cost_a_copy_and_between_hosts_what_the_link_takes() -> None:
    harness = Harness("a", "b", "c")
    near, far = harness.add("d", DECODE, "a"), harness.add("e", DECODE, "b")
    assert harness.cost("a", near)[:4] == ("a", "a", 62_500_000, 8.0)
    assert harness.cost("a", near).ms == pytest.approx(8.0 + 12.5)
    assumed = harness.cost("a", far)
    assert assumed.fixed_ms == 10.0 and assumed.transfer_ms == pytest.approx(62.5, rel=0.5)
    harness.report("b", harness.kv_load(a={"latency_ms": 4.0, "bytes_per_second": 2000.0 * MEGABYTE}))
    measured = harness.cost("a", far)
    assert measured.fixed_ms == 12.0 and measured.transfer_ms < assumed.transfer_ms
    assert harness.cost("c", far) == assumed._replace(from_host="c"), "another pair"
    assert harness.cost("a", near, num_own=600).num_bytes == 25_000_000
    assert harness.column("a") == pytest.approx([harness.cost("a", each).ms for each in (near, far)])


@pytest.mark.parametrize(
    ("shown", "num_late_ms"),
    [
        (Shown(1000, 1000, 0.0), 625.0),  # one step: all is shown at its end
        (Shown(1000, 400, 300.0), 325.0),  # 600 tokens move meanwhile, but for what takes longer than the steps
        (Shown(1000, 400, 9_000.0), 250.0),  # what the last step computes moves after it in any case
        (Shown(1000, 1, 100.0), 525.0),
    ],
)
def test_what_moves_while_prefill_computes_costs_nothing(shown: Shown, num_late_ms: float) -> None:
    harness = Harness("a", "b")
    far = harness.add("e", DECODE, "b")
    harness.report("b", harness.kv_load(a={"latency_ms": 0.0, "bytes_per_second": 100.0 * MEGABYTE}))
    assert harness.cost("a", far, shown).transfer_ms == pytest.approx(num_late_ms)
    assert harness.column("a", shown) == pytest.approx([harness.cost("a", far, shown).ms])


def test_a_worker_shows_what_each_of_its_steps_computes() -> None:
    figures = Harness("a").add("p", PREFILL, "a").figures
    assert hand_overs.shown(figures, 1000, 400, 400.0) == Shown(1000, 400, 0.0)
    assert hand_overs.shown(figures, 1000, 1000, 1000.0) == Shown(1000, 400, 600.0)
    without = msgspec.structs.replace(figures, chunk_tokens=None)
    assert hand_overs.shown(without, 1000, 1000, 1000.0) == Shown(1000, 512, 488.0)


def test_a_rate_of_short_transfers_is_better_in_long_windows_and_worse_in_short_ones() -> None:
    probed = Link(80.0, 10.0 * MEGABYTE, 1.0 * MEGABYTE)  # 1 MB took 100 ms, of which 80 were the round trip
    assert 1 / probed.ms_per_byte(4.0 * MEGABYTE) == pytest.approx(MEGABYTE / 40)
    assert 1 / probed.ms_per_byte(0.1 * MEGABYTE) == pytest.approx(MEGABYTE / 820)
    wrong = Link(200.0, 10.0 * MEGABYTE, 1.0 * MEGABYTE)  # its latency is that of other transfers
    assert wrong.ms_per_byte(1e12) == pytest.approx(0.1 * 100 / MEGABYTE, rel=1e-4)
    assert Link(80.0, 10.0 * MEGABYTE).ms_per_byte(1e12) == pytest.approx(100 / MEGABYTE, rel=1e-4)


def test_windows_at_once_hide_their_round_trips_as_far_as_the_link_can_carry_them() -> None:
    at_once = Link(80.0, 10.0 * MEGABYTE, 1.0 * MEGABYTE, reads_at_once=4)  # 20 ms per MB are its own
    assert 1 / at_once.ms_per_byte(4.0 * MEGABYTE) == pytest.approx(MEGABYTE / 20)
    assert 1 / at_once.ms_per_byte(1.0 * MEGABYTE) == pytest.approx(MEGABYTE / 25)


def test_one_read_is_no_faster_than_a_connection() -> None:
    far = Link(80.0, 100.0 * MEGABYTE, 16.0 * MEGABYTE, reads_at_once=4)
    assert far.bytes_per_second_of_one == pytest.approx((4 << 20) / 0.08)
    near = Link(0.2, 1000.0 * MEGABYTE, 16.0 * MEGABYTE, reads_at_once=4)
    assert near.bytes_per_second_of_one == near.bytes_per_second
    assert Link(80.0, 100.0 * MEGABYTE).bytes_per_second_of_one == 100.0 * MEGABYTE, "as it was measured"


def test_a_link_that_was_only_probed_has_the_rate_of_the_probe() -> None:
    probe = pb.KvLink(address="a:1", latency_ms=80.0, bytes_per_second=1.0)
    used = pb.KvLink(address="b:1", bytes_per_second=1.0, num_bytes=40 * MEGABYTE, num_transfers=10)
    small = pb.KvLink(address="c:1", bytes_per_second=1.0, num_bytes=1000, num_transfers=10)
    at_once = pb.KvLink(address="d:1", bytes_per_second=1.0, num_bytes=40, num_transfers=10, bytes_per_run=9 << 20)
    load = pb.LoadReport(kv_service=pb.KvServiceLoad(links=[probe, used, small, at_once, pb.KvLink(address="never")]))
    links = figures_of(pb.WorkerInfo(), load).links
    assert {address: (link.bytes_per_transfer, link.reads_at_once) for address, link in links.items()} == {
        "a:1": (1 << 20, 1),
        "b:1": (4 * MEGABYTE, 1),
        "c:1": (256 << 10, 1),  # of shorter ones no rate is taken
        "d:1": (9 << 20, 4),
    }


def test_a_full_arena_makes_hand_overs_between_hosts_wait_and_a_small_one_cuts_them_into_more_windows() -> None:
    harness = Harness("a", "b")
    near, far = harness.add("d", DECODE, "a"), harness.add("e", DECODE, "b")
    harness.report("b", harness.kv_load(64 << 20, 64 << 20))
    free = harness.cost("a", far)
    assert free.wait_ms == 0.0
    for host in "ab":
        harness.report(host, harness.kv_load(1 << 20, 64 << 20))
    full = harness.cost("a", far)
    assert full.wait_ms == pytest.approx(7 * (1 << 20) * full.ms_per_byte)  # two windows of 4 MiB, less 1 MiB
    assert full._replace(wait_ms=0.0) == free
    assert harness.cost("a", near).wait_ms == 0.0, "within a host nothing is copied into the arena"
    assert harness.cost("a", far, Shown(10, 10, 0.0)).wait_ms == 0.0, "there is room for 0.6 MB"
    assert harness.column("a") == pytest.approx([harness.cost("a", each).ms for each in (near, far)])
    harness.report("b", harness.kv_load(1 << 20, 1 << 20))
    small = harness.cost("a", far)
    assert small.ms_per_byte - full.ms_per_byte == pytest.approx(2.0 / (1 << 18) - 2.0 / (4 << 20))
    assert harness.column("a") == pytest.approx([harness.cost("a", each).ms for each in (near, far)])


def test_each_pair_learns_for_itself_what_its_link_does_not_explain() -> None:
    harness = Harness("a", "b")
    near, far = harness.add("d", DECODE, "a"), harness.add("e", DECODE, "b")
    before, column = harness.cost("a", near), harness.column("a")
    assert column == pytest.approx([before.ms, harness.cost("a", far).ms])
    transfer_ms = harness.cost("a", far).transfer_ms
    for _ in range(60):
        harness.costs.ended(ALL_AT_ONCE, "a", far, 62_500_000, 2 * transfer_ms + 300.0)
        harness.costs.ended(ALL_AT_ONCE, "a", far, 0, 300.0)
    assert harness.cost("a", far).fixed_ms == pytest.approx(300.0, rel=0.01)
    assert harness.cost("a", far).transfer_ms == pytest.approx(2 * transfer_ms, rel=0.05)
    assert harness.cost("a", near) == before and harness.cost("b", near).fixed_ms == 10.0
    assert harness.column("a") == pytest.approx([before.ms, harness.cost("a", far).ms])
    for _ in range(60):
        harness.costs.ended(ALL_AT_ONCE, "a", far, 62_500_000, 1.0)  # sooner than the link promises
    assert harness.cost("a", far).fixed_ms == pytest.approx(0.0, abs=0.1)
    assert harness.cost("a", far).transfer_ms <= transfer_ms / 6
    harness.costs.ended(ALL_AT_ONCE, "a", far, 0, 1e9)
    assert harness.cost("a", far).fixed_ms <= 800.0, "the difference of two clocks"


def test_a_prompt_that_is_soon_computed_hides_only_a_part_of_the_round_trip() -> None:
    harness = Harness("a", "b")
    near, far = harness.add("d", DECODE, "a"), harness.add("e", DECODE, "b")
    harness.report("b", harness.kv_load(a=FAR))
    soon, late = Shown(10, 10, 0.0, 20.0), Shown(10, 10, 0.0, 500.0)
    assert harness.cost("a", far, soon).ms == pytest.approx(harness.cost("a", far, late).ms + 60.0)
    assert harness.cost("a", near, soon) == harness.cost("a", near, late), "it asks its own KV service"
    assert harness.column("a", soon) == pytest.approx([harness.cost("a", each, soon).ms for each in (near, far)])
    for _ in range(60):
        harness.costs.ended(soon, "a", far, 625_000, 300.0)
    assert harness.cost("a", far, soon).ms == pytest.approx(300.0, rel=0.01)
    assert harness.cost("a", far, late).ms == pytest.approx(240.0, rel=0.01)


def test_what_was_learnt_is_forgotten_by_half_in_a_minute_so_that_a_slow_pair_is_tried_again() -> None:
    harness = Harness("a", "b")
    far = harness.add("e", DECODE, "b")
    for _ in range(60):
        harness.costs.ended(ALL_AT_ONCE, "a", far, 0, 1010.0)
    for num_half_lives in range(4):
        expected = 10.0 + 1000.0 * 0.5**num_half_lives
        assert harness.cost("a", far).fixed_ms == pytest.approx(expected, rel=0.01)
        assert harness.column("a") == pytest.approx([harness.cost("a", far).ms])
        harness.now += HALF_LIFE_SECONDS


def test_pairs_are_forgotten_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_overs, "MAX_PAIRS", 2)
    harness = Harness()
    readers = [harness.add(f"d{host}", DECODE, host) for host in "abc"]
    for reader in readers:
        harness.column("x")
        harness.costs.ended(ALL_AT_ONCE, "x", reader, 0, 500.0)
    assert [harness.cost("x", each).fixed_ms for each in readers] == [10.0, *[pytest.approx(108.0)] * 2]
    assert harness.column("x") == pytest.approx([harness.cost("x", each).ms for each in readers])


def test_columns_keep_the_prefill_hosts_that_were_asked_about_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_columns, "_MAX_PAIRS", 2)
    harness = Harness()
    reader = harness.add("d", DECODE, "h")
    for host in ("a", "b", "c", "a"):
        assert harness.column(host) == pytest.approx([harness.cost(host, reader).ms])
        harness.now += 10.0


def test_columns_are_kept_while_workers_come_and_go_on_the_same_hosts() -> None:
    harness = Harness("a", "b", "c")
    readers = [harness.add("d", DECODE, "a"), harness.add("e", DECODE, "b")]

    def pairs_of(readers: list[Worker]) -> PairColumns | None:
        assert harness.column("a") == pytest.approx([harness.cost("a", each).ms for each in readers])
        ((table,),) = [group.decodes for group in harness.router._columns.groups(RoutingRequest("m", 1, 1))]
        return table.pairs

    before = pairs_of(readers)
    harness.add("f", DECODE, "b")
    assert pairs_of(readers) is before
    harness.registry.deregister("f", "f-1")
    harness.kv("c", "c:2")
    assert pairs_of(readers) is before
    readers.append(harness.add("g", DECODE, "c"))
    assert pairs_of(readers) is not before
    harness.registry.deregister("d", "d-1")
    assert len(harness.column("a")) == 2


def test_a_kv_service_that_starts_again_is_another_end_of_its_links() -> None:
    harness = Harness("a", "b")
    far = harness.add("e", DECODE, "b")
    harness.report("b", harness.kv_load(a=FAR))
    assert harness.cost("a", far).fixed_ms == 88.0 and harness.column("a") == [harness.cost("a", far).ms]
    harness.kv("a", "a:2")
    assert harness.cost("a", far).fixed_ms == 10.0 and harness.column("a") == [harness.cost("a", far).ms]
    harness.kv("a")
    assert harness.cost("a", far).fixed_ms == 88.0
    harness.report("b", harness.kv_load())  # nothing was read for ten minutes
    assert harness.cost("a", far).fixed_ms == 10.0 and harness.column("a") == [harness.cost("a", far).ms]
    harness.report("b", harness.kv_load(a=FAR))
    harness.registry.deregister("kv-b", "kv-b-1")
    assert harness.cost("a", far).fixed_ms == 10.0 and harness.column("a") == [harness.cost("a", far).ms]


def test_a_link_that_wavers_changes_nothing_until_it_has_changed_by_a_twentieth() -> None:
    harness = Harness("a", "b")
    far, changes = harness.add("e", DECODE, "b"), []
    harness.report("b", harness.kv_load(a=FAR))
    before = harness.cost("a", far)
    for share in (1.02, 1.04, 1.06):
        harness.report("b", harness.kv_load(a={**FAR, "latency_ms": 80.0 * share}))
        changes.append(harness.cost("a", far) != before)
    assert changes == [False, False, True]


def test_of_two_sites_the_prompt_is_read_and_answered_at_one() -> None:
    harness = Harness("a", "b")
    for host in "ab":
        harness.add(f"p-{host}", PREFILL, host)
        harness.add(f"d-{host}", DECODE, host, num_running=8)
    harness.report("a", harness.kv_load(b=FAR))
    harness.report("b", harness.kv_load(a=FAR))
    request = RoutingRequest("m", 3000, 64)
    for busy in ("p-a", "p-b", "d-a", "d-b"):
        entry = harness.router.in_flight.add(f"{busy}-1", num_prefill_tokens=100, num_decode_tokens=40_000)
        route = harness.router.choose(request)
        here = "b" if busy.endswith("a") else "a"
        assert (route.prefill_id, route.decode_id) == (f"p-{here}", f"d-{here}")
        entry.remove()


def test_a_sessions_prefill_worker_is_left_only_if_another_host_is_much_nearer() -> None:
    harness = Harness("a", "b")
    harness.add("p-a", PREFILL, "a")
    harness.add("p-b", PREFILL, "b")
    harness.add("d-b", DECODE, "b", num_running=8)
    harness.router.affinity.remember("s", SessionRoute("p-a-1", "d-b-1"))
    request = RoutingRequest("m", 3000, 64, session_id="s")
    assert harness.router.choose(request).prefill_id == "p-a"
    harness.report("b", harness.kv_load(a={**FAR, "bytes_per_second": 20.0 * MEGABYTE}))
    assert harness.router.choose(request).prefill_id == "p-b"


def test_long_prompts_stay_where_they_are_if_the_link_is_slow_and_short_ones_if_it_is_far() -> None:
    harness = Harness("a", "b")
    harness.add("p", PREFILL, "a")
    harness.add("d", DECODE, "b")

    def is_handed_over(num_tokens: int) -> bool:
        return harness.router.choose(RoutingRequest("m", num_tokens, 64)).prefill is not None

    assert is_handed_over(100) and is_handed_over(10_000)
    harness.report("b", harness.kv_load(a={"latency_ms": 30.0, "bytes_per_second": 1000.0 * MEGABYTE}))
    assert not is_handed_over(100) and is_handed_over(10_000)
    harness.report("b", harness.kv_load(a={"latency_ms": 1.0, "bytes_per_second": 20.0 * MEGABYTE}))
    assert not is_handed_over(10_000)


def test_an_explanation_shows_what_each_hand_over_is_made_of() -> None:
    harness = Harness("a", "b")
    harness.add("p-a", PREFILL, "a")
    harness.add("p-b", PREFILL, "b")
    far = harness.add("d", DECODE, "b", num_running=4)
    harness.report("b", harness.kv_load(1 << 20, 64 << 20, a={"latency_ms": 8.0, "bytes_per_second": 500.0 * MEGABYTE}))
    route = harness.router.choose(RoutingRequest("m", 1000, 64))
    shown = {each.worker: each for each in route.explained().candidates if each.role == "prefill"}
    assert shown["p-b"].hand_over is not None and shown["p-b"].predicted_ms == route.predicted_ms["hand_over"]
    assert (shown["p-b"].hand_over.from_host, shown["p-b"].hand_over.wait_ms) == ("b", 0.0)
    cost = harness.cost("a", far, Shown(1000, 400, 600.0))
    assert shown["p-a"].hand_over_ms == pytest.approx(cost.ms) == shown["p-a"].predicted_ms - 1000.0
    found = shown["p-a"].to_json()["hand_over"]
    assert (found["from_host"], found["to_host"], found["num_bytes"], found["fixed_ms"]) == ("a", "b", 62_500_000, 16.0)
    assert found["wait_ms"] == pytest.approx(cost.wait_ms, abs=0.001) and found["wait_ms"] > 0
    assert found["bytes_per_second"] == round(1000 / cost.ms_per_byte)


def test_an_explanation_has_the_round_trip_that_a_short_prompt_does_not_hide() -> None:
    harness = Harness("a", "b")
    harness.add("p-a", PREFILL, "a")
    harness.add("d", DECODE, "b", num_running=99)
    harness.report("b", harness.kv_load(a=FAR))
    route = harness.router.choose(RoutingRequest("m", 20, 64))
    assert route.prefill is not None
    (shown,) = [each for each in route.explained().candidates if each.role == "prefill"]
    assert shown.predicted_ms == pytest.approx(route.predicted_ms["hand_over"])
    assert shown.hand_over_ms is not None and shown.hand_over_ms > 2 * FAR["latency_ms"] - 20.0


def test_columns_say_what_single_costs_say_for_any_figures() -> None:
    rng, hosts = np.random.default_rng(1), [f"h{number}" for number in range(6)]
    harness = Harness(*hosts)
    readers = [harness.add(f"d-{host}", DECODE, host) for host in hosts]
    for _ in range(40):
        host = hosts[rng.integers(6)]
        report = harness.kv_load(rng.uniform(0, 1e7), 1e9 * rng.integers(0, 2))
        for each in {*hosts} - {host}:
            report.kv_service.links.add(
                address=f"{each}:1", latency_ms=rng.uniform(0, 9), bytes_per_second=rng.uniform(1e7, 1e10)
            )
        harness.report(host, report)
        what = Shown(int(rng.integers(1, 5000)), int(rng.integers(1, 600)), rng.uniform(0, 500), rng.uniform(0, 12))
        harness.costs.ended(what, hosts[rng.integers(6)], readers[rng.integers(6)], 10_000, rng.uniform(0, 100))
        for each in hosts:
            assert harness.column(each, what) == pytest.approx([harness.cost(each, one, what).ms for one in readers])


def test_a_column_that_is_made_now_says_what_single_costs_say_whatever_has_come_and_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new column looks only at hosts of which something is known: none of them may be missed."""
    monkeypatch.setattr(hand_overs, "MAX_PAIRS", 8)
    rng, hosts = np.random.default_rng(2), [f"h{number}" for number in range(6)]
    harness = Harness(*hosts)
    readers = [harness.add(f"d-{host}", DECODE, host) for host in hosts]
    what = Shown(2000, 500, 100.0)
    num_known = 0
    for _ in range(300):
        host = hosts[rng.integers(6)]
        match rng.integers(5):
            case 0:
                harness.kv(host, f"{host}:{rng.integers(1, 3)}")
            case 1:
                harness.registry.deregister(f"kv-{host}", f"kv-{host}-1")
            case 2 if harness.registry.get(f"kv-{host}") is not None:
                far = [each for each in hosts if each != host and rng.integers(2)]
                report = harness.kv_load()
                report.kv_service.links.extend([pb.KvLink(address=f"{each}:1", **FAR) for each in far])  # type: ignore[arg-type]
                harness.report(host, report)
            case _:
                harness.costs.ended(what, host, readers[rng.integers(6)], 10_000, rng.uniform(0, 100))
        harness.now += 1.0
        columns = PairColumns(hosts, harness.costs, lambda: harness.now)
        for each in hosts:
            wanted = [harness.cost(each, one, what).ms for one in readers]
            assert columns.ms(what, each, readers[0].figures.bytes_per_token) == pytest.approx(wanted)
            num_known += len(harness.costs.not_strange_to(each)) - 1
    assert num_known > 1000
