"""Is everything found that is kept in vain, and nothing that is only on its way?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.audit import gauges
from control_plane.audit.asking import Asker
from control_plane.audit.checks import KINDS, suspicions
from control_plane.audit.snapshot import Audited, Snapshot
from control_plane.audit.suspicion import Suspicion, Suspicions, orphan_bytes
from control_plane.auditor import Auditor, AuditReport
from control_plane.fleet import Fleet
from control_plane.links import LinkPool
from control_plane.registry import Worker, WorkerRegistry
from runtime import metrics
from runtime.server import GrpcServer
from tandem.v1 import kv_transfer_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import (
    ArenaRow,
    HandleRow,
    HoldRow,
    LateCopyRow,
    PullRow,
    ReaderRow,
    RegionRow,
    RequestRow,
    StoreLeaseRow,
    TablesReply,
    TablesRequest,
    UntoldRow,
)
from tests.control_plane.scripted_worker import DECODE, PREFILL, kv_load, kv_service
from tests.kv_transfer_svc.host import a_client, closed, running_host, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_prompt_cache import chain, published, wanted
from tests.otlp_sink import OtlpSink

NOW = 1_000_000
"""The services' clocks, in milliseconds."""
LATER = NOW + 60_000
KV = pb.WORKER_ROLE_KV
H = b"h" * 16
NAME = f"r/{H.hex()}"


def service(name: str, role: pb.WorkerRole.ValueType, **tables: Any) -> Audited:
    info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-life", role=role, address=f"{name}:1")
    reply = TablesReply(incarnation=info.incarnation, now_unix_ms=NOW, lease_ms=10_000, **tables)
    return Audited(Worker(info, pb.LoadReport(), 0.0), reply)


def handle(**changes: Any) -> HandleRow:
    fields: dict[str, Any] = {
        "handle_id": H,
        "request_id": "r",
        "owner_incarnation": "prefill-life",
        "state": "LEASED",
        "num_bytes": 100,
        "region_id": "region",
        "lease_until_unix_ms": LATER,
        "deadline_unix_ms": LATER,
        "readers": [ReaderRow(reader_id="r-0", incarnation="decode-life", lease_until_unix_ms=LATER)],
    }
    return HandleRow(**{**fields, **changes})


def hold(**changes: Any) -> HoldRow:
    fields = {"handle_id": H, "request_id": "r", "holder_incarnation": "kv-life", "num_bytes": 100}
    return HoldRow(**{**fields, "deadline_unix_ms": LATER, **changes})


def pull(**changes: Any) -> PullRow:
    return PullRow(**{"handle_id": H, "reader_id": "r-0", "kv_address": "kv:1", "num_bytes": 100, **changes})


def request(request_id: str, **changes: Any) -> RequestRow:
    fields = {"request_id": request_id, "gateway_id": "gateway", "num_bytes": 100, "deadline_unix_ms": LATER}
    return RequestRow(**{**fields, "handle_id": H, **changes})


RUNNING = frozenset({("prefill-life", "r", 0), ("decode-life", "r-0", 0)})


def snapshot(*services: Audited, silent: tuple[str, ...] = (), **changes: Any) -> Snapshot:
    answered = {each.incarnation: each for each in services}
    return Snapshot(answered, frozenset(silent), **{"running": RUNNING, "gateway_id": "gateway", **changes})


def one_hand_over(**instead: Audited) -> list[Audited]:
    """A request between prefill and decode, on which everybody agrees; `instead` replaces services by name."""
    services = {
        "kv": service("kv", KV, handles=[handle()], regions=[RegionRow(owner_incarnation="prefill-life")]),
        "prefill": service("prefill", PREFILL, holds=[hold()], requests=[request("r")]),
        "decode": service("decode", DECODE, pulls=[pull()], requests=[request("r-0")]),
    }
    return list({**services, **instead}.values())


def seen(*services: Audited, **changes: Any) -> list[tuple[str, str, str, int]]:
    found = suspicions(snapshot(*services, **changes))
    return sorted((each.kind, each.service, each.name, each.num_bytes) for each in found)


def test_services_that_agree_are_not_suspected() -> None:
    assert seen(*one_hand_over()) == []


def test_blocks_held_for_a_handle_that_the_kv_service_forgot_are_suspected() -> None:
    kv = service("kv", KV)
    assert seen(*one_hand_over(kv=kv, decode=service("decode", DECODE))) == [("unknown_to_kv", "prefill", NAME, 100)]


def test_blocks_held_for_a_kv_service_that_is_gone_are_suspected() -> None:
    prefill = service("prefill", PREFILL, holds=[hold(holder_incarnation="kv-life-before")])
    assert seen(prefill) == [("unknown_to_kv", "prefill", NAME, 100)]


def test_a_handle_of_a_worker_that_is_gone_is_suspected_with_its_region() -> None:
    _, _, decode = one_hand_over()
    kv = service(
        "kv",
        KV,
        handles=[handle()],
        regions=[RegionRow(region_id="region", owner_incarnation="prefill-life", num_bytes=7)],
    )
    assert seen(kv, decode) == [("owner_gone", "kv", NAME, 100), ("region_of_the_gone", "kv", "region", 7)]


def test_what_no_dispatcher_has_is_suspected_at_each_place() -> None:
    gone = [("request_gone", name, NAME, 100) for name in ("kv", "prefill", "prefill")]
    decodes = ("request_gone", "decode", f"r-0/{H.hex()}", 100)
    assert seen(*one_hand_over(), running=frozenset()) == [decodes, *gone]


def test_another_replicas_requests_are_left_alone_until_their_deadline() -> None:
    theirs = {
        "kv": service("kv", KV, handles=[handle()]),
        "prefill": service("prefill", PREFILL, holds=[hold()], requests=[request("r", gateway_id="another")]),
        "decode": service("decode", DECODE, pulls=[pull()], requests=[request("r-0", gateway_id="another")]),
    }
    assert seen(*theirs.values(), running=frozenset(), is_alone=False) == []
    theirs["prefill"] = service("prefill", PREFILL, holds=[hold(deadline_unix_ms=NOW - 1)])
    assert seen(*theirs.values(), running=frozenset(), is_alone=False) == [("request_gone", "prefill", NAME, 100)]


def test_a_handle_whose_blocks_were_given_up_is_suspected() -> None:
    prefill = service("prefill", PREFILL, requests=[request("r")])
    assert seen(*one_hand_over(prefill=prefill)) == [("not_held", "kv", NAME, 100)]


@pytest.mark.parametrize("decode", [service("another", DECODE), service("decode", DECODE, requests=[request("r-0")])])
def test_a_lease_of_a_reader_that_is_gone_or_knows_nothing_of_it_is_suspected(decode: Audited) -> None:
    assert seen(*one_hand_over(decode=decode)) == [("readers_gone", "kv", NAME, 100)]


def test_one_reader_that_is_there_is_reason_enough_to_keep_a_handle() -> None:
    readers = [ReaderRow(reader_id=f"r-{i}", incarnation=who) for i, who in enumerate(("decode-life", "dead", ""))]
    assert seen(*one_hand_over(kv=service("kv", KV, handles=[handle(readers=readers)]))) == []


def test_a_reader_on_another_host_is_its_kv_service_with_a_copy() -> None:
    readers = [ReaderRow(reader_id="r-0", incarnation="far-life")]
    copy = handle(is_copy=True, readers=[ReaderRow(reader_id="r-0", incarnation="decode-life")])
    near = service("kv", KV, handles=[handle(readers=readers)])
    decode = service("decode", DECODE, pulls=[pull(kv_address="far:1")], requests=[request("r-0")])
    far = service("far", KV, handles=[copy], arena=[ArenaRow(handle_id=H, num_bytes=50)], arena_used_bytes=50)
    assert seen(*one_hand_over(kv=near, decode=decode), far) == []
    far = service("far", KV)
    assert seen(*one_hand_over(kv=near, decode=decode), far) == [
        ("pull_in_vain", "decode", f"r-0/{H.hex()}", 100),
        ("readers_gone", "kv", NAME, 100),
    ]


def test_what_a_kv_service_keeps_too_long_by_its_own_word_is_suspected() -> None:
    row = handle(lease_until_unix_ms=NOW - 1)
    kv = service(
        "kv",
        KV,
        handles=[row],
        untold=[UntoldRow(handle_id=b"u" * 16, request_id="u", owner_incarnation="prefill-life", num_bytes=20)],
        store_leases=[
            StoreLeaseRow(reader_id="over", lease_until_unix_ms=NOW - 1, num_bytes=30),
            StoreLeaseRow(reader_id="runs", lease_until_unix_ms=LATER, num_bytes=30),
        ],
        late_copies=[LateCopyRow(block="block 1", state="FILLING", num_bytes=40)],
    )
    assert seen(*one_hand_over(kv=kv)) == [
        ("copy_unfinished", "kv", "block 1", 40),
        ("overdue", "kv", NAME, 100),
        ("store_lease_overdue", "kv", "over", 30),
        ("untold", "kv", f"u/{(b'u' * 16).hex()}", 20),
    ]


def test_arena_memory_that_no_pull_claims_is_suspected() -> None:
    rows = [ArenaRow(handle_id=H, request_id="r", num_bytes=30), ArenaRow(request_id="x", num_bytes=20, has_ended=True)]
    kv = service("kv", KV, arena=rows, arena_used_bytes=60)
    assert seen(kv) == [("arena_kept", "kv", "x/", 20), ("arena_unclaimed", "kv", "arena", 10)]


def test_the_pool_of_a_worker_with_nothing_to_do_must_be_empty() -> None:
    pool = pb.KvPool(num_used_blocks=3, bytes_per_block=10)
    assert seen(service("decode", DECODE, pool=pool, num_requests_so_far=7)) == [
        ("pool_not_empty", "decode", "pool after 7 requests", 30)
    ]
    busy = service("decode", DECODE, pool=pool, requests=[request("r-0")])
    assert seen(busy) == []


def test_every_kind_is_explained() -> None:
    assert all(KINDS.values())
    assert len(KINDS) == 14


def test_nothing_is_concluded_from_a_table_that_is_cut_off_or_did_not_come() -> None:
    for kv in (service("kv", KV, num_left_out=1), None):
        rest = [service("prefill", PREFILL, holds=[hold()]), service("decode", DECODE, pulls=[pull()])]
        assert seen(*([kv] if kv else []), *rest, silent=() if kv else ("kv-life",)) == []
    kv = service("kv", KV, handles=[handle()])
    assert seen(kv, silent=("prefill-life", "decode-life")) == []


# ------------------------------------------------------------------------------------------- what lasts is an orphan


def suspicion(name: str = "a", num_bytes: int = 10, **changes: Any) -> Suspicion:
    fields: dict[str, Any] = {"kind": "overdue", "service": "kv", "incarnation": "kv-life", "place": "prefill-life"}
    fields |= {"name": name, "num_bytes": num_bytes, "needs": frozenset({"kv-life"})}
    return Suspicion(**{**fields, **changes})


class Watch:
    """Audits by hand, with a patience of 15 seconds."""

    def __init__(self) -> None:
        self.suspicions = Suspicions()

    def at(self, now: float, *found: Suspicion, silent: tuple[str, ...] = ()) -> list[tuple[str, float, int]]:
        self.suspicions.update(found, frozenset(silent), now, patience_seconds=15.0, gap_seconds=7.0)
        findings = self.suspicions.findings(15.0)
        return [(each.suspicion.name, each.seconds, each.num_bytes) for each in findings]


def test_a_difference_counts_only_once_it_has_outlasted_every_lease() -> None:
    watch = Watch()
    for now in (0, 5, 10, 14.9):
        assert watch.at(now, suspicion()) == []
    assert watch.at(15, suspicion()) == [("a", 15, 10)]
    assert watch.at(20, suspicion()) == [("a", 20, 10)]
    assert watch.at(21) == []


def test_a_difference_that_goes_away_begins_anew() -> None:
    watch = Watch()
    for now in (0, 5, 10):
        assert watch.at(now, suspicion()) == []
    watch.at(12)
    assert [watch.at(now, suspicion()) for now in (14, 20, 26)] == [[], [], []]
    assert watch.at(29, suspicion()) == [("a", 15, 10)]


def test_what_nobody_looked_at_for_long_begins_anew_unless_it_is_known_already() -> None:
    watch = Watch()
    assert [watch.at(now, suspicion()) for now in (0, 1, 20)] == [[], [], []]
    assert [watch.at(now, suspicion()) for now in (26, 32)] == [[], []]
    assert watch.at(38, suspicion()) == [("a", 18, 10)]
    assert watch.at(90, suspicion()) == [("a", 70, 10)]


def test_silence_neither_confirms_nor_clears() -> None:
    watch = Watch()
    for now in (0, 5, 10):
        watch.at(now, suspicion())
    assert watch.at(16, silent=("kv-life",)) == []
    assert watch.at(17, suspicion()) == [("a", 17, 10)]
    assert watch.at(18, silent=("kv-life",)) == [("a", 17, 10)]
    assert watch.at(19) == []


def test_of_what_varies_the_least_that_there_was_all_the_while_counts() -> None:
    watch = Watch()
    for now, num_bytes in ((0, 50), (5, 20), (10, 90)):
        watch.at(now, suspicion(num_bytes=num_bytes))
    assert watch.at(15, suspicion(num_bytes=70)) == [("a", 15, 20)]


def test_nothing_is_counted_twice() -> None:
    watch = Watch()
    region = suspicion("region", 1000, kind="region_of_the_gone", place="dead")
    inside = suspicion("in it", 100, kind="owner_gone", place="dead")
    twice = [suspicion("b", 7, kind="unknown_to_kv", service="prefill"), suspicion("b", 7, kind="untold")]
    for now in (0, 5, 10, 15):
        watch.at(now, region, inside, *twice)
    counted = {each.suspicion.name: num for each, num in orphan_bytes(watch.suspicions.findings(15.0)).items()}
    assert counted == {"region": 1000, "in it": 0, "b": 7}


LAGS = st.floats(0, 3.5)


@given(
    st.lists(st.tuples(st.floats(0, 60), st.floats(0, 40), LAGS, LAGS, LAGS, LAGS, LAGS, LAGS), max_size=12),
    st.lists(st.floats(0.1, 12), min_size=5, max_size=30),
)
def test_a_healthy_fleet_shows_nothing_however_busy_it_is_and_whenever_one_looks(
    lives: list[tuple[float, ...]], gaps: list[float]
) -> None:
    watch, now = Watch(), 0.0
    for gap in gaps:
        now += gap
        assert watch.at(now, *suspicions(_at(now, lives))) == []


def _at(now: float, lives: list[tuple[float, ...]]) -> Snapshot:
    """The tables of a moment. Each party hears of each request's begin and end a little later than the gateway."""
    handles, holds, pulls, running = [], [], [], set()
    for number, (begin, seconds, *lags) in enumerate(lives):
        handle_id, end = bytes([number]) * 16, begin + seconds
        kv, prefill, decode = ((begin + lags[i] <= now < end + lags[i + 3]) for i in range(3))
        if begin <= now < end:
            running |= {("prefill-life", f"q{number}", 0), ("decode-life", f"q{number}-0", 0)}
        reader = ReaderRow(reader_id=f"q{number}-0", incarnation="decode-life")
        names = {"handle_id": handle_id, "request_id": f"q{number}"}
        handles += [handle(**names, readers=[reader])] if kv else []
        holds += [hold(**names)] if prefill else []
        pulls += [pull(handle_id=handle_id, reader_id=f"q{number}-0")] if decode else []
    return snapshot(
        service("kv", KV, handles=handles),
        service("prefill", PREFILL, holds=holds),
        service("decode", DECODE, pulls=pulls),
        running=frozenset(running),
    )


# ------------------------------------------------------------------------------------------------ real connections


class Told(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """A KV service that has the tables a test gives it."""

    def __init__(self, name: str = "kv-0") -> None:
        self.name = name
        self.tables = TablesReply(incarnation=f"{name}-life", lease_ms=100)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.address = ""

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        await self.may_answer.wait()
        return self.tables

    def register(self, registry: WorkerRegistry) -> None:
        registry.register(kv_service(self.name, self.address), kv_load())


@asynccontextmanager
async def told(registry: WorkerRegistry, name: str = "kv-0") -> AsyncIterator[Told]:
    kv = Told(name)  # type: ignore[abstract]  # it answers Tables, and is asked nothing else
    server = GrpcServer(
        "127.0.0.1:0", lambda server: kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(kv, server), []
    )
    kv.address = await server.start()
    kv.register(registry)
    try:
        yield kv
    finally:
        await server.stop(0)


@asynccontextmanager
async def auditing(registry: WorkerRegistry, **changes: Any) -> AsyncIterator[Auditor]:
    links = LinkPool(registry, "gateway", "life")
    auditor = Auditor(registry, links, "gateway", asker=Asker(answer_seconds=0.3), **{"grace_seconds": 0.1, **changes})
    try:
        yield auditor
    finally:
        await auditor.close()
        await links.close()


def region(num_bytes: int) -> RegionRow:
    return RegionRow(region_id="region", owner_incarnation="nobody", num_bytes=num_bytes)


async def test_an_orphan_is_named_where_it_is_until_it_is_gone() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with told(registry) as kv, auditing(registry) as auditor:
        assert (await auditor.verdict()).findings == ()
        kv.tables.regions.append(region(1 << 20))
        assert (await auditor.audit()).orphan_bytes == 0
        report = await auditor.verdict()
        assert report.orphan_bytes == 1 << 20
        assert report.by_service_and_kind() == {("kv-0", "region_of_the_gone"): 1 << 20}
        (row,) = Fleet(registry, auditor.orphans_of).workers()
        (orphan,) = row["orphans"]
        assert (orphan["name"], orphan["num_bytes"], orphan["what"]) == ("region", 1 << 20, KINDS["region_of_the_gone"])
        kv.tables.ClearField("regions")
        assert (await auditor.audit()).findings == ()
        assert Fleet(registry, auditor.orphans_of).workers()[0]["orphans"] == []


async def test_one_that_does_not_answer_neither_stops_nor_delays_the_audit_of_the_others() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with told(registry) as kv, told(registry, "kv-1") as hangs, auditing(registry) as auditor:
        hangs.may_answer.clear()
        registry.register(kv_service("kv-2", "127.0.0.1:1"), kv_load())
        kv.tables.regions.append(region(64))
        report = await auditor.verdict()
        assert (report.orphan_bytes, report.num_answered, sorted(report.unanswered)) == (64, 1, ["kv-1", "kv-2"])
        hangs.may_answer.set()


async def test_another_life_at_the_same_address_is_not_believed() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with told(registry) as kv, auditing(registry) as auditor:
        kv.tables.incarnation = "kv-0-next-life"
        assert "kv-0-next-life" in (await auditor.audit()).unanswered["kv-0"]


async def test_audits_go_on_by_themselves_and_never_where_they_are_turned_off() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with told(registry) as kv:
        kv.tables.regions.append(region(64))
        async with auditing(registry, audit_seconds=0.05) as auditor, auditing(registry, audit_seconds=0) as off:
            tasks = [asyncio.create_task(each.run()) for each in (auditor, off)]
            await until(lambda: auditor.report.orphan_bytes == 64)
            assert off.report == AuditReport()
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_bug_in_an_audit_does_not_end_the_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = WorkerRegistry(3.0, 5.0)
    async with told(registry) as kv, auditing(registry, audit_seconds=0.01) as auditor:
        kv.tables.regions.append(region(64))
        real, num_calls = auditor._asker.ask, 0

        async def broken(workers: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise ZeroDivisionError
            return await real(workers)

        monkeypatch.setattr(auditor._asker, "ask", broken)
        task = asyncio.create_task(auditor.run())
        await until(lambda: auditor.report.orphan_bytes == 64)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_orphans_and_silence_reach_the_collector() -> None:
    report = AuditReport(unanswered={"kv-1": "gone"})
    try:
        async with OtlpSink() as sink:
            metrics.configure("tandem-control", sink.endpoint)
            gauges.export(lambda: report)
            await asyncio.to_thread(metrics.shutdown)
            names = {f"tandem.kv.{name}" for name in ("orphan_bytes", "audit.unanswered", "audit.left_out")}
            await sink.wait_for(lambda it: names <= it.metric_names)
    finally:
        metrics.shutdown()


# ------------------------------------------------------------------------------------------ a real service's tables


async def test_a_kv_service_says_who_owns_and_who_reads_what(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        given = writer.handle(num_blocks=1)
        await writer.client.reserve(given, writer.region_id, a_layout())
        await writer.client.seal(given, [writer.slab(0, 0, [0])], closed(1))
        await watch_all(reader, given, "r-0")
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        (row,) = tables.handles
        assert (row.handle_id, row.owner_incarnation, row.state) == (given.handle_id, writer.incarnation, "LEASED")
        assert [(each.reader_id, each.incarnation) for each in row.readers] == [("r-0", reader.incarnation)]
        assert row.num_bytes == BLOCK_BYTES
        assert [each.owner_incarnation for each in tables.regions] == [writer.incarnation]
        await reader.release_all(given)
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        assert ([each.handle_id for each in tables.untold], len(tables.handles)) == ([given.handle_id], 0)
        await anext(writer.client.own(writer.region_id))
        await _until_tables(host.service.Tables, lambda now: not now.untold)


async def test_what_is_too_much_for_a_table_is_counted(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        for _ in range(5):
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout())
        tables = await host.service.Tables(TablesRequest(max_rows=2), None)
        assert (len(tables.handles), tables.num_left_out) == (2, 3)


async def test_the_arena_is_claimed_by_the_pulls_that_use_it(tmp_path: Path) -> None:
    hosts = running_host(tmp_path), running_host(tmp_path)
    async with hosts[0] as near, hosts[1] as far, running_writer(near) as writer, a_client(far) as reader:
        given = writer.handle(num_blocks=2)
        await writer.client.reserve(given, writer.region_id, a_layout())
        await writer.client.seal(given, [writer.slab(0, 0, [0, 1])], closed(2))
        await watch_all(reader, given, "r-0")
        tables = await far.service.Tables(TablesRequest(max_rows=10), None)
        (row,) = tables.arena
        assert row.num_bytes == tables.arena_used_bytes > 0
        assert tables.handles[0].is_copy
        theirs = await near.service.Tables(TablesRequest(max_rows=10), None)
        assert [each.incarnation for each in theirs.handles[0].readers] == [far.incarnation]
        await reader.release(given, "r-0")
        await _until_tables(far.service.Tables, lambda now: not now.arena and not now.arena_used_bytes)


async def test_stored_blocks_that_are_lent_are_in_the_table(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        await writer.client.publish(published(writer, chain(2), [0, 1]))
        await reader.load(wanted(chain(2), "someone/r"))
        tables = await host.service.Tables(TablesRequest(max_rows=10), None)
        (lease,) = tables.store_leases
        assert (lease.reader_id, lease.num_bytes) == ("someone/r", host.prompt_cache.blocks.figures().leased_bytes)
        assert lease.num_bytes > 0
        assert 0 < lease.lease_until_unix_ms - tables.now_unix_ms <= 10_000


async def _until_tables(ask: Callable[..., Any], condition: Callable[[TablesReply], bool]) -> None:
    async def holds() -> bool:
        return condition(await ask(TablesRequest(max_rows=10), None))

    await until(holds)
