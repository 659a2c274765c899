"""The router prefers workers that have the prompt cached, unless that would take longer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.groups import index_space
from control_plane.routing.prefix_index import CachedPrefix
from control_plane.routing.router import Route, Router
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tests.control_plane.routing.first_choice import FirstChoice

DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL
BLOCK, MEGABYTE = 16, 1_000_000
CHAIN = [bytes([index]) * 16 for index in range(100)]
NUM_TOKENS = 100 * BLOCK + 1
"""A prompt of 100 full blocks and a token: 1,601 ms at 1,000 tokens per second."""
PROMPT = RoutingRequest("m", NUM_TOKENS, 64, CHAIN, BLOCK)


class Harness:
    """Hosts with a KV service each, their workers at 1,000 prompt tokens per second and 1 MB per block."""

    def __init__(self, *hosts: str, local_prefill: Literal["auto", "never"] = "never") -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3.0, 5.0, lambda: self.now)
        self.router = Router(self.registry, local_prefill, rng=FirstChoice(), clock=lambda: self.now)
        for host in hosts:
            self.add_kv(host)

    def add_kv(self, host: str, *links: pb.KvLink, has_store: bool = True) -> None:
        info = pb.WorkerInfo(worker_id=f"kv-{host}", incarnation="1", role=pb.WORKER_ROLE_KV, address=address(host))
        info.host_id = host
        load = pb.KvServiceLoad(links=links, store=pb.KvStoreLoad(total_bytes=1) if has_store else None)
        self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=load))

    def add(self, name: str, role: pb.WorkerRole.ValueType, host: str = "h", **load: Any) -> None:
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=role, host_id=host, kv_address=address(host))
        info.card.CopyFrom(pb.ModelCard(model_id="m", context_length=4096, block_size=BLOCK))
        pool = pb.KvPool(num_total_blocks=1000, num_free_blocks=1000, tokens_per_block=BLOCK, bytes_per_block=MEGABYTE)
        counters = {"prompt_tokens_computed": 1000.0, "step_seconds": 1.0, "steps": 100.0}
        fields = {"state": pb.WORKER_STATE_READY, "kv": pool, "counters": counters, **load}
        self.registry.register(info, pb.LoadReport(**fields))

    def report(self, name: str, **load: Any) -> None:
        """Report another load of a worker that is here."""
        worker = self.worker(name)
        report = pb.LoadReport()
        report.CopyFrom(worker.load)
        report.MergeFrom(pb.LoadReport(**load))
        beat = cp.HeartbeatRequest(worker_id=name, incarnation=worker.incarnation, load=report)
        beat.kv_address = worker.info.kv_address
        assert self.registry.heartbeat(beat)

    def worker(self, name: str) -> Worker:
        worker = self.registry.get(name)
        assert worker is not None
        return worker

    def handed_over(self, took_ms: float) -> None:
        """Report a hand-over from `pa` to `d`, of nothing."""
        self.router.costs.handed_over(self.worker("pa"), pb.PhaseLedger(), self.worker("d"), 0, took_ms)

    def learn(self, name: str, num_blocks: int, host: str = "h") -> None:
        self.router.prefixes.learn(CHAIN[:num_blocks], f"{name}-1", host, space=self.space)

    @property
    def space(self) -> bytes:
        """All workers have cards of release 0.2 that differ in nothing that counts."""
        return index_space(self.registry.workers(DECODE)[0])

    def prefill_of(self, request: RoutingRequest = PROMPT) -> tuple[str, Route]:
        route = self.router.choose(request)
        assert route.prefill is not None, route.reason
        return route.prefill.worker_id, route


def address(host: str) -> str:
    return f"{host}:1"


def pair(**options: Any) -> Harness:
    harness = Harness("h", **options)
    for name in "ab":
        harness.add(f"p{name}", PREFILL)
    harness.add("d", DECODE)
    return harness


def test_the_worker_with_the_cache_wins_unless_its_queue_costs_more() -> None:
    harness = pair()
    harness.learn("pb", 50, "")
    assert harness.prefill_of()[0] == "pb"
    harness.router.in_flight.prefill_tokens["pb-1"] = 799
    assert harness.prefill_of()[0] == "pb"
    harness.router.in_flight.prefill_tokens["pb-1"] = 801
    assert harness.prefill_of()[0] == "pa"


def test_what_the_host_has_is_nearly_as_good_for_every_worker_there() -> None:
    harness = pair()
    harness.learn("pb", 50)
    name, route = harness.prefill_of()
    assert (name, route.describe()["cached_own_tokens"], route.describe()["cached_host_tokens"]) == ("pb", 800, 0)
    harness.router.in_flight.prefill_tokens["pb-1"] = 100
    name, route = harness.prefill_of()
    assert (name, route.describe()["cached_own_tokens"], route.describe()["cached_host_tokens"]) == ("pa", 0, 800)
    assert route.predicted_ms["load"] == pytest.approx(10.0)  # 50 MB at 5 GB/s
    assert route.predicted_ms["compute"] == pytest.approx(801.0)


def test_the_last_token_is_always_computed() -> None:
    harness = pair()
    harness.learn("pa", 99)
    harness.learn("pa", 100)
    request = RoutingRequest("m", 100 * BLOCK, 64, CHAIN, BLOCK)
    assert harness.prefill_of(request)[1].describe()["cached_own_tokens"] == 99 * BLOCK
    assert harness.prefill_of(request)[1].predicted_ms["compute"] == pytest.approx(16.0)


def test_another_hosts_blocks_are_fetched_if_that_is_sooner_than_computing() -> None:
    harness = Harness("h", "far")
    harness.add("p", PREFILL)
    harness.add("d", DECODE)
    harness.learn("elsewhere", 50, "far")
    _, route = harness.prefill_of()
    described = route.describe()
    assert (described["prefix_source"], described["cached_remote_tokens"]) == ("far:1", 800)
    assert route.predicted_ms["load"] == pytest.approx(52.0)  # 50 MB at the assumed 1 GB/s, and 2 ms
    estimate = route.estimates[route.workers[0].incarnation]
    assert harness.router.costs.prefix_wait_ms(estimate) == pytest.approx(4 * 52.0)
    slower = msgspec.structs.replace(estimate, load_ms=300.0)
    assert harness.router.costs.prefix_wait_ms(slower) == pytest.approx(800.0), "as long as computing it takes"
    slow = pb.KvLink(address="far:1", bytes_per_second=60 * MEGABYTE, latency_ms=7.0)
    harness.add_kv("h", slow)
    assert harness.prefill_of()[1].describe()["prefix_source"] == ""  # 50 blocks are computed in 800 ms
    slow.bytes_per_second = 500 * MEGABYTE
    harness.add_kv("h", slow)
    assert harness.prefill_of()[1].predicted_ms["load"] == pytest.approx(107.0)


@pytest.mark.parametrize("missing", ["here", "there"])
def test_without_a_store_on_either_host_nothing_is_fetched(missing: str) -> None:
    harness = Harness("h", "far")
    harness.add("p", PREFILL)
    harness.add("d", DECODE)
    harness.learn("elsewhere", 50, "far")
    harness.add_kv("h" if missing == "here" else "far", has_store=False)
    assert harness.prefill_of()[1].describe()["prefix_source"] == ""


def test_a_store_that_does_not_keep_its_promises_is_believed_less_and_again_once_it_does() -> None:
    harness = pair()
    harness.learn("gone", 50)
    costs = harness.router.costs
    assert harness.prefill_of()[1].predicted_ms["compute"] == pytest.approx(801.0)
    for _ in range(20):
        costs.stores.used("h", 800, 0)
    assert harness.prefill_of()[1].predicted_ms["compute"] == pytest.approx(1601, rel=0.02)
    for _ in range(20):
        costs.stores.used("h", 800, 800)
    assert harness.prefill_of()[1].predicted_ms["compute"] == pytest.approx(801, rel=0.02)


def test_a_short_prompt_is_read_by_decode_a_busy_one_takes_only_a_shorter_one() -> None:
    harness = pair(local_prefill="auto")
    assert harness.router.choose(PROMPT).prefill is not None
    assert (
        harness.router.choose(RoutingRequest("m", 15, 64)).prefill is None
    )  # 15 ms and half of it again, against 15 + 8.2
    assert harness.router.choose(RoutingRequest("m", 17, 64)).prefill is not None
    harness.add("d", DECODE, num_running=4)
    assert harness.router.choose(RoutingRequest("m", 15, 64)).prefill is not None
    assert harness.router.choose(RoutingRequest("m", 3, 64)).prefill is None


def test_answers_count_from_their_submission_to_their_end_whenever_the_worker_reports() -> None:
    harness = pair(local_prefill="auto")
    costs, in_flight = harness.router.costs, harness.router.in_flight
    ended, lasting = [in_flight.add("d-1", num_answers=1) for _ in range(2)]
    harness.report("d", num_running=5)
    assert costs.num_answers(harness.worker("d")) == 5, "three are of other gateways"
    ended.remove()
    assert costs.num_answers(harness.worker("d")) == 4
    in_flight.add("d-1", num_answers=3)
    assert costs.num_answers(harness.worker("d")) == 7
    harness.report("d", num_running=2)
    assert costs.num_answers(harness.worker("d")) == 4, "some wait for their prompts"
    lasting.remove()
    harness.registry.deregister("d", "d-1")
    harness.add("d", DECODE, num_running=4)
    assert costs.num_answers(harness.worker("d")) == 4


def test_an_answer_that_has_ended_since_the_report_makes_no_prompt_dearer() -> None:
    harness = pair(local_prefill="auto")
    entries = [harness.router.in_flight.add("d-1", num_answers=1) for _ in range(4)]
    harness.report("d", num_running=4)
    request = RoutingRequest("m", 15, 64)
    assert harness.router.choose(request).prefill is not None
    for entry in entries:
        entry.remove()
    assert harness.router.choose(request).prefill is None


def test_the_break_even_follows_the_measured_hand_over() -> None:
    harness = pair(local_prefill="auto")
    harness.add("d", DECODE, num_running=2)
    assert harness.router.choose(RoutingRequest("m", 50, 64)).prefill is not None
    for _ in range(30):
        harness.handed_over(100.0)
    route = harness.router.choose(RoutingRequest("m", 50, 64))
    assert route.prefill is None and "decode computes the prompt: d in 50.0 ms" in route.reason
    assert route.predicted_ms["hand_over"] == pytest.approx(150.6, rel=0.01)  # 3.1 MB are copied in 0.6 ms
    assert route.predicted_ms["local"] == pytest.approx(100)


def test_a_burst_of_short_prompts_is_not_all_read_by_decode() -> None:
    harness = pair(local_prefill="auto")
    assert harness.router.choose(RoutingRequest("m", 12, 64)).prefill is None
    harness.router.in_flight.prefill_tokens["d-1"] = 12
    assert harness.router.choose(RoutingRequest("m", 12, 64)).prefill is not None


def test_the_next_turn_of_a_chat_is_read_where_the_last_answer_was_written() -> None:
    harness = pair(local_prefill="auto")
    harness.add("e", DECODE, num_running=1)
    harness.add("d", DECODE, num_running=1)
    harness.router.prefixes.learn(CHAIN[:99], "e-1", "", space=harness.space)
    route = harness.router.choose(PROMPT)
    assert route.prefill is None and route.decodes[0].worker_id == "e"
    assert route.describe()["cached_own_tokens"] == 99 * BLOCK


def test_probes_are_handed_over_and_choices_that_move_never_are() -> None:
    harness = pair(local_prefill="auto")
    assert harness.router.choose(RoutingRequest("m", 15, 2, hand_over="always")).prefill is not None
    harness.add("d", DECODE, num_running=9)
    assert harness.router.choose(RoutingRequest("m", 1500, 2, hand_over="never")).prefill is None
    never = pair()
    assert never.router.choose(RoutingRequest("m", 15, 2)).prefill is not None


def test_decode_is_as_fast_as_it_was_measured_or_else_as_prefill_is() -> None:
    harness = pair(local_prefill="auto")
    assert harness.router.choose(PROMPT).predicted_ms["compute"] == pytest.approx(1601.0)
    ledger = pb.PhaseLedger(num_computed_tokens=400, scheduled_ns=1, first_token_ns=100_000_001)
    harness.router.costs.prompt_read(harness.worker("d"), ledger)
    assert harness.router.choose(PROMPT).predicted_ms["compute"] == pytest.approx(1601 / 4)
    harness.registry.deregister("d", "d-1")
    harness.add("d", DECODE)
    assert harness.router.choose(PROMPT).predicted_ms["compute"] == pytest.approx(1601 / 4), "as its peers were"


def test_a_workers_first_prompt_says_nothing_and_until_then_it_is_as_fast_as_its_peers_at_that_moment() -> None:
    harness = Harness("h", local_prefill="auto")
    for name in ("a", "b"):
        harness.add(name, DECODE)
    costs, rates = harness.router.costs, harness.router.costs.tokens_per_second
    for milliseconds in (400, 40, 40, 40):  # the first one loads what every prompt needs
        ledger = pb.PhaseLedger(num_computed_tokens=400, scheduled_ns=1, first_token_ns=1 + milliseconds * 10**6)
        costs.prompt_read(harness.worker("a"), ledger)
        assert rates(harness.worker("b")) == pytest.approx(rates(harness.worker("a")), rel=0.35)
    assert 2_500 < rates(harness.worker("b")) < 3_500
    before = rates(harness.worker("b"))
    ledger = pb.PhaseLedger(num_computed_tokens=400, scheduled_ns=1, first_token_ns=1 + 400 * 10**6)
    costs.prompt_read(harness.worker("b"), ledger)
    assert rates(harness.worker("b")) == pytest.approx(before)
    costs.prompt_read(harness.worker("b"), ledger)
    assert rates(harness.worker("b")) < 0.8 * before, "the second one is slow for another reason"


def test_a_prompt_took_no_longer_than_the_gateway_waited_for_it() -> None:
    """The worker's clock was set forward by an hour meanwhile."""
    harness = Harness("h", local_prefill="auto")
    harness.add("d", DECODE)
    ledger = pb.PhaseLedger(num_computed_tokens=400, scheduled_ns=1, first_token_ns=3_600 * 10**9)
    harness.router.costs.prompt_read(harness.worker("d"), ledger, 0.1)
    assert harness.router.costs.tokens_per_second(harness.worker("d")) == pytest.approx(4_000)


def test_a_decode_worker_that_was_slow_once_counts_as_its_peers_after_some_minutes() -> None:
    """Nothing else would show that it is fast now: a slow one gets no prompts."""
    harness = Harness("h", local_prefill="auto")
    for name, seconds, num_prompts in (("other", 1, 51), ("slow", 100, 2)):
        harness.add(name, DECODE)
        ledger = pb.PhaseLedger(num_computed_tokens=4_000, scheduled_ns=1, first_token_ns=seconds * 10**9)
        for _ in range(num_prompts):
            harness.router.costs.prompt_read(harness.worker(name), ledger)
    told: list[str] = []
    harness.router.costs.listen(told.append)
    beat = cp.HeartbeatRequest(worker_id="slow", incarnation="slow-1", load=harness.worker("slow").load)
    for pause, expected in ((200.0, 60), (101.0, 990)):
        harness.now += pause
        harness.registry.heartbeat(beat)
        assert harness.router.costs.measured_rate(harness.worker("slow")) == pytest.approx(expected, rel=0.1)
    harness.registry.heartbeat(beat)
    assert told == ["slow-1"]
    ledger = pb.PhaseLedger(num_computed_tokens=4_000, scheduled_ns=1, first_token_ns=10**9)
    harness.router.costs.prompt_read(harness.worker("slow"), ledger)
    rate = harness.router.costs.measured_rate(harness.worker("slow"))
    assert rate is not None and rate > 1_900


def test_equal_workers_seem_nearly_equal_whatever_the_lengths_of_their_prompts() -> None:
    """A step takes 4 ms and 40 ms for each 1,000 tokens; `a` got new sessions, `b` later turns of theirs."""
    harness = Harness("h", local_prefill="auto")
    harness.add("a", DECODE)
    harness.add("b", DECODE)
    for _ in range(20):
        for name, num_tokens in (("a", 128), ("b", 48)):
            end_ns = 1 + 4_000_000 + 40_000 * num_tokens
            ledger = pb.PhaseLedger(num_computed_tokens=num_tokens, scheduled_ns=1, first_token_ns=end_ns)
            harness.router.costs.prompt_read(harness.worker(name), ledger)
    rate = {name: harness.router.costs.tokens_per_second(harness.worker(name)) for name in "ab"}
    assert rate["b"] < rate["a"] < 1.2 * rate["b"], "2.1 by their own prompts alone"


def test_a_worker_whose_card_has_changed_since_its_prompts_is_as_fast_as_they_say() -> None:
    """A gateway may have connected before the model was loaded: the ledger came from a worker without one."""
    harness = Harness("h", local_prefill="auto")
    harness.add("d", DECODE)
    before = pb.WorkerInfo(incarnation="d-1", role=DECODE)
    ledger = pb.PhaseLedger(num_computed_tokens=400, scheduled_ns=1, first_token_ns=100_000_001)
    for _ in range(2):
        harness.router.costs.prompt_read(Worker(before, pb.LoadReport(), 0.0), ledger)
    assert harness.router.costs.tokens_per_second(harness.worker("d")) == pytest.approx(4_000)


def test_a_worker_that_is_slow_with_long_prompts_is_known_to_be_slow() -> None:
    harness = Harness("h", local_prefill="auto")
    for name, rate in (("fast", 20_000), ("slow", 5_000)):
        harness.add(name, DECODE)
        for _ in range(20):
            ledger = pb.PhaseLedger(num_computed_tokens=4_000, scheduled_ns=1, first_token_ns=1 + 10**9 * 4_000 // rate)
            harness.router.costs.prompt_read(harness.worker(name), ledger)
    rates = {name: harness.router.costs.tokens_per_second(harness.worker(name)) for name in ("fast", "slow")}
    assert rates["slow"] < 5_500
    assert rates["fast"] > 15_000


def test_what_another_host_does_not_deliver_is_expected_less_and_again_after_some_minutes() -> None:
    """The link may be cut, or the layout another one: block events say that the blocks are there."""
    harness = Harness("h", "far")
    harness.add("p", PREFILL)
    harness.add("d", DECODE)
    harness.learn("elsewhere", 50, "far")

    def remote() -> tuple[int, float]:
        _, route = harness.prefill_of()
        return route.describe()["cached_remote_tokens"], route.predicted_ms["compute"]

    assert remote() == pytest.approx((800, 801.0))
    harness.router.costs.stores.used_from_afar("far", "h", 800, 0)
    assert remote() == pytest.approx((800, 801.0 + 160))
    for _ in range(20):
        harness.router.costs.stores.used_from_afar("far", "h", 800, 0)
    assert remote() == pytest.approx((0, 1601.0))
    harness.router.costs.stores.used_from_afar("far", "elsewhere", 800, 800)
    harness.now += 600.0
    assert remote() == pytest.approx((800, 801.0), rel=0.01)


def test_a_reason_says_all_of_it_in_milliseconds() -> None:
    harness = pair()
    harness.learn("pa", 50)
    assert harness.prefill_of()[1].reason == (
        "pa in 801.0 ms (queue 0.0, load 0.0, compute 801.0; cached 800 own, 0 host, 0 remote, 801 to compute), "
        "the soonest of 2 prefill workers; 1 decode workers"
    )
    assert harness.prefill_of()[1].describe()["predicted_hand_over_ms"] == 815.4


def test_nothing_is_known_of_a_prompt_whose_cache_is_nobodys() -> None:
    harness = pair()
    harness.learn("pb", 50)
    route = harness.prefill_of(RoutingRequest("m", NUM_TOKENS, 64))[1]
    assert route.estimates["pa-1"].cached == CachedPrefix()


def test_a_prefill_worker_has_gone_on_since_its_report() -> None:
    """800 tokens wait by the report; at 1,000 tokens a second half of them are left after 0.4 s."""
    harness = pair()
    harness.add("pa", PREFILL, num_tokens_in_flight=800)
    busy = harness.registry.get("pa")
    assert busy is not None
    assert harness.router.costs.num_queued(busy) == 800
    harness.now = 0.4
    assert harness.router.costs.num_queued(busy) == 400
    entry = harness.router.in_flight.add(busy.incarnation, num_prefill_tokens=600)
    assert harness.router.costs.num_queued(busy) == 600, "what this gateway sent is not done before the worker says so"
    entry.remove()
    harness.now = 2.0
    assert harness.router.costs.num_queued(busy) == 0
