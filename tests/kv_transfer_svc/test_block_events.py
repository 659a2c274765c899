"""A KV service tells which sample points its store has, and what it evicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kv_transfer_svc import event_stream, host_points
from kv_transfer_svc.disk import DiskTier
from kv_transfer_svc.host_points import HostPoints
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import HandleRow, TablesReply, TablesRequest
from tandem_engine.scheduling.sample_points import is_sample_point
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InvalidRequest, PermissionDenied, StaleIncarnation
from tandem_runtime.kv.client import KvClient
from tests.certificates import Authority
from tests.kv_transfer_svc.host import a_client, running_host, running_writer, until
from tests.kv_transfer_svc.layout import a_layout
from tests.kv_transfer_svc.test_host_cache import chain, fill_with_others, published, wanted
from tests.kv_transfer_svc.writer import Writer

CHAIN = chain(40)


def test_a_sample_point_ends_at_16_32_64_128_or_a_multiple_of_256_tokens() -> None:
    assert [num for num in range(1, 1030) if is_sample_point(num)] == [16, 32, 64, 128, 256, 512, 768, 1024]
    assert not is_sample_point(0)


class Seen:
    """What one reader of a host's events knows by now."""

    def __init__(self) -> None:
        self.places: dict[str, set[bytes]] = {}
        self.num_snapshots = 0
        self.numbers: list[int] = []

    def take(self, batch: kv.BlockEventBatch) -> None:
        self.numbers.append(batch.number)
        if batch.is_snapshot:
            self.num_snapshots += 1
            self.places = {}
        for place in batch.places:
            if place.is_gone:
                del self.places[place.incarnation]
                continue
            points = self.places.setdefault(place.incarnation, set())
            evicted, stored = points_in(place.evicted), points_in(place.stored)
            assert evicted <= points and not stored & points
            points -= evicted
            points |= stored

    @property
    def store(self) -> set[bytes]:
        return self.places.get("", set())


def points_in(packed: bytes) -> set[bytes]:
    return {packed[start : start + 8] for start in range(0, len(packed), 8)}


def points(hashes: Sequence[bytes], *places: int) -> set[bytes]:
    return {hashes[place][:8] for place in places}


@asynccontextmanager
async def reading(client: KvClient) -> AsyncIterator[Seen]:
    seen = Seen()

    async def read() -> None:
        async with aclosing(client.block_events()) as batches:
            async for batch in batches:
                seen.take(batch)

    task = asyncio.create_task(read())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def placed(request: kv.PublishRequest, first_block: int, tokens_per_block: int = 16) -> kv.PublishRequest:
    request.first_block, request.tokens_per_block = first_block, tokens_per_block
    return request


async def publish(writer: Writer, hashes: Sequence[bytes], first: int = 0, tokens_per_block: int = 16) -> None:
    """Publish a chain from a block on, in calls of eight blocks."""
    for start in range(first, len(hashes), 8):
        run = hashes[start : start + 8]
        request = published(writer, run, range(len(run)), parent=hashes[start - 1] if start else b"")
        await writer.client.publish(placed(request, start, tokens_per_block))


async def test_readers_are_told_of_the_stores_sample_points_and_of_evictions(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as gateway:
        await publish(writer, CHAIN[:20])
        host.service.sweep()
        async with reading(gateway) as seen:
            # 1. First everything.
            await until(lambda: seen.store == points(CHAIN, 0, 1, 3, 7, 15))
            # 2. Then changes.
            await publish(writer, CHAIN, first=16)
            host.service.sweep()
            await until(lambda: seen.store == points(CHAIN, 0, 1, 3, 7, 15, 31))
            # 3. What is evicted is gone.
            await fill_with_others(host, writer, writer.client)
            host.service.sweep()
            await until(lambda: seen.store == set())
        assert (seen.num_snapshots, seen.numbers) == (1, list(range(len(seen.numbers))))


async def test_a_block_that_moves_to_disk_is_still_stored_and_found_again_after_a_restart(tmp_path: Path) -> None:
    def disk() -> DiskTier:
        return DiskTier(tmp_path / "disk", 16 << 20, 1 << 20)

    async with running_host(tmp_path, disk=disk()) as host, running_writer(host) as writer:
        await publish(writer, CHAIN[:8])
        await fill_with_others(host, writer, writer.client)
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7)
    async with running_host(tmp_path, disk=disk()) as host, a_client(host) as reader:
        host.service.sweep()
        assert not host.service.points.points_of("")  # nobody has said yet where the blocks lie in their chains
        request = wanted(CHAIN[:8])
        request.tokens_per_block = 16
        assert (await reader.load(request)).num_from_disk == 8
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7)


async def test_blocks_of_more_tokens_have_their_points_at_the_same_tokens(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        await publish(writer, CHAIN[:20], tokens_per_block=32)
        host.service.sweep()
        assert set(host.service.points.points_of("")) == points(CHAIN, 0, 1, 3, 7, 15)
        await publish(writer, chain(20, "of a worker that does not state the place"), tokens_per_block=0)
        host.service.sweep()
        assert len(host.service.points) == 5


async def test_only_gateways_may_read_block_events(tmp_path: Path) -> None:
    authority = Authority()
    service, decode = (authority.member(tmp_path, role) for role in ("kv", "decode"))
    async with running_host(tmp_path, member=service) as host, a_client(host, decode) as client:
        with pytest.raises(PermissionDenied):
            async for _ in client.block_events():
                pass


# ------------------------------------------------------------------------------------------------ the host's points


def a_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_changes_of_one_batch_that_cancel_out_are_not_sent() -> None:
    host, seen = HostPoints(), Seen()
    host.change("w", [a_key(1), a_key(2)], [])
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(1), a_key(2)}}
        host.change("w", [a_key(3)], [a_key(1)])
        host.change("w", [a_key(1)], [a_key(3)])
        host.change("w", [], [a_key(2)])
        (batch,) = reader.take()
        assert (batch.places[0].stored, batch.places[0].evicted) == (b"", a_key(2))
        assert list(reader.take()) == []
        host.change("w", [], [a_key(9)])  # never stored: nothing changes
        assert list(reader.take()) == []


def test_a_pool_that_ends_is_told_of_and_may_come_back() -> None:
    host, seen = HostPoints(), Seen()
    host.change("w", [a_key(1)], [])
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        host.end("w")
        host.end("w")
        host.change("w", [a_key(5)], [])
        for batch in reader.take():
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(5)}}


def test_a_reader_that_is_too_slow_gets_everything_again_in_parts() -> None:
    host, seen = HostPoints(), Seen()
    with host.read() as reader:
        for batch in reader.take():
            seen.take(batch)
        for start in range(0, 250_000, 1_000):
            host.change("w", [a_key(number) for number in range(start, start + 1_000)], [])
        assert reader._num_pending == 0
        batches = list(reader.take())
        assert [batch.is_snapshot for batch in batches] == [True, *[False] * 62]
        host.change("w", [], [a_key(0)])  # while the parts are on their way
        for batch in [*batches, *reader.take()]:
            seen.take(batch)
        assert seen.places == {"": set(), "w": {a_key(number) for number in range(1, 250_000)}}
        assert seen.numbers == list(range(65))


# --------------------------------------------------------------------------------------------- reports of workers


def a_report(*keys: int, evicted: Sequence[int] = (), name: str = "w", is_whole: bool = False) -> kv.PoolReport:
    return kv.PoolReport(
        incarnation=name,
        is_whole=is_whole,
        stored=b"".join(map(a_key, keys)),
        evicted=b"".join(map(a_key, evicted)),
    )


async def test_a_pool_is_known_while_its_worker_reports_it(tmp_path: Path) -> None:
    reports: asyncio.Queue[kv.PoolReport] = asyncio.Queue()

    async def stream() -> AsyncIterator[kv.PoolReport]:
        while True:
            yield await reports.get()

    async with running_host(tmp_path) as host, a_client(host) as worker, a_client(host) as gateway:
        reporting = asyncio.create_task(worker.report_pool(stream()))
        async with reading(gateway) as seen:
            reports.put_nowait(a_report(1, 2, is_whole=True))
            await until(lambda: seen.places.get("w") == {a_key(1), a_key(2)})
            reports.put_nowait(a_report(3, evicted=[1]))
            await until(lambda: seen.places.get("w") == {a_key(2), a_key(3)})
            reporting.cancel()
            await until(lambda: seen.places == {"": set()})


def test_a_second_stream_of_a_worker_replaces_what_the_first_has_told() -> None:
    host = HostPoints()
    with host.reported() as second:
        with host.reported() as first:
            first.take(a_report(1, 2, is_whole=True))
            second.take(a_report(2, 3, is_whole=True))
            assert set(host.points_of("w")) == {a_key(2), a_key(3)}
            with pytest.raises(StaleIncarnation):
                first.take(a_report(4))
        assert set(host.points_of("w")) == {a_key(2), a_key(3)}  # the first stream has ended, the second has not
    assert dict(host.items()) == {"": set()}


def a_beat(incarnation: str = "w", num_running: int = 0) -> cp.HeartbeatRequest:
    return cp.HeartbeatRequest(
        worker_id="worker-1", incarnation=incarnation, load=pb.LoadReport(num_running=num_running)
    )


def test_the_latest_heartbeat_of_each_worker_goes_with_the_next_batch_to_each_reader() -> None:
    host = HostPoints()
    with host.reported() as pool, host.read() as reader:
        list(reader.take())  # the snapshot
        for number in range(3):
            report = a_report(number, is_whole=number == 0)
            report.heartbeat.CopyFrom(a_beat(num_running=number))
            pool.take(report)
        [batch] = reader.take()
        assert list(batch.heartbeats) == [a_beat(num_running=2)] and len(batch.places) == 1
        assert not list(reader.take()), "each goes once"
        host.heartbeat(a_beat(num_running=7))
        [batch] = reader.take()
        assert list(batch.heartbeats) == [a_beat(num_running=7)] and not batch.places, "alone, if nothing else is there"


def test_a_reader_that_begins_gets_heartbeats_with_its_snapshot_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_points, "_MAX_HEARTBEATS", 2)
    host = HostPoints()
    with host.read() as reader:
        for number in range(3):
            beat = a_beat()
            beat.worker_id = f"worker-{number}"
            host.heartbeat(beat)
        [snapshot] = [batch for batch in reader.take() if batch.is_snapshot]
        assert [beat.worker_id for beat in snapshot.heartbeats] == ["worker-0", "worker-1"], "as many as are kept"


async def test_heartbeats_are_sent_although_no_pool_changes(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, a_client(host) as gateway:
        batches = gateway.block_events()
        assert (await anext(batches)).is_snapshot
        host.service.points.heartbeat(a_beat())
        async with asyncio.timeout(20):
            while not (batch := await anext(batches)).heartbeats:
                pass
        assert list(batch.heartbeats) == [a_beat()]
        await batches.aclose()


async def test_the_auditor_gets_the_tables_between_block_events_as_by_a_call(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as gateway:
        await writer.client.reserve(writer.handle(), writer.region_id, a_layout())
        questions: asyncio.Queue[pb.AskTables | None] = asyncio.Queue()
        async with aclosing(gateway.block_events(questions)) as batches:
            snapshot = await anext(batches)
            assert (snapshot.is_snapshot, snapshot.answers_tables) == (True, True)
            questions.put_nowait(pb.AskTables(number=7, max_rows=4096))
            while not (batch := await anext(batches)).HasField("tables"):
                pass
        part = batch.tables
        assert (part.number, part.is_last, batch.number) == (7, True, 0)
        told = TablesReply.FromString(part.data)
        by_call = await host.service.Tables(TablesRequest(max_rows=4096), None)
        assert len(told.handles) == 1
        for reply in (told, by_call):
            reply.ClearField("now_unix_ms")
        assert told == by_call


async def test_block_events_do_not_wait_for_all_parts_of_a_huge_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_EVENT_SECONDS", "_HEARTBEAT_SECONDS"):
        monkeypatch.setattr(event_stream, pause, 0.0)
    points, asked = HostPoints(), asyncio.Queue[kv.BlockEventsRequest]()

    async def requests() -> AsyncIterator[kv.BlockEventsRequest]:
        while True:
            yield await asked.get()

    huge = TablesReply(handles=[HandleRow(handle_id=bytes(5_000_000))])
    async with aclosing(event_stream.event_stream(points, lambda max_rows: huge, requests())) as batches:
        assert (await anext(batches)).is_snapshot
        asked.put_nowait(kv.BlockEventsRequest(tables=pb.AskTables(number=1)))
        read = [await anext(batches)]
        assert read[0].HasField("tables")
        points.change("w", [b"8 bytes."], [])
        while not read[-1].tables.is_last:
            read.append(await anext(batches))
        assert b"".join(batch.tables.data for batch in read) == huge.SerializeToString()
        assert [batch.places[0].incarnation for batch in read[:20] if batch.places] == ["w"], "among the first parts"


async def test_a_gateway_of_the_release_before_sends_one_request_and_gets_events(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, open_channel(host.address) as channel:
        block_events: Any = channel.unary_stream(
            "/tandem.v1.KvTransferService/BlockEvents",
            request_serializer=kv.BlockEventsRequest.SerializeToString,
            response_deserializer=kv.BlockEventBatch.FromString,
        )
        call = block_events(kv.BlockEventsRequest())
        assert (await call.read()).is_snapshot
        host.service.points.change("w", [b"8 bytes."], [])
        places = (await call.read()).places
        assert [(place.incarnation, place.stored) for place in places] == [("w", b"8 bytes.")]
        call.cancel()


async def test_a_gateway_that_hangs_up_leaves_no_reader_behind(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, a_client(host) as gateway:
        async with reading(gateway) as seen:
            await until(lambda: seen.num_snapshots == 1)
            assert len(host.service.points._readers) == 1
        await until(lambda: not host.service.points._readers)


def test_a_heartbeat_beyond_all_measure_is_not_passed_on() -> None:
    host = HostPoints()
    report = a_report(1, is_whole=True)
    report.heartbeat.CopyFrom(a_beat())
    report.heartbeat.load.error = "x" * 40_000
    with host.reported() as pool, host.read() as reader:
        pool.take(report)
        assert not any(batch.heartbeats for batch in reader.take())


def test_a_heartbeat_of_another_worker_is_refused() -> None:
    host = HostPoints()
    report = a_report(1, is_whole=True)
    report.heartbeat.CopyFrom(a_beat("another life"))
    with host.reported() as pool, host.read() as reader:
        with pytest.raises(InvalidRequest, match="its worker's"):
            pool.take(report)
        assert not any(batch.heartbeats for batch in reader.take())


@pytest.mark.parametrize(
    "reports",
    [
        [a_report(1)],
        [a_report(1, is_whole=True, name="")],
        [a_report(1, is_whole=True, name="w" * 200)],
        [a_report(1, is_whole=True), a_report(2, name="other")],
        [kv.PoolReport(incarnation="w", is_whole=True, stored=b"seven b")],
    ],
    ids=["not whole", "the store's name", "a long name", "another worker", "no key"],
)
def test_a_report_that_no_worker_sends_is_refused(reports: Sequence[kv.PoolReport]) -> None:
    host = HostPoints()
    with host.reported() as pool, pytest.raises(InvalidRequest):
        for report in reports:
            pool.take(report)
    assert dict(host.items()) == {"": set()}


def test_a_pool_has_at_most_a_million_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_points, "_MAX_POINTS_OF_POOL", 3)
    host = HostPoints()
    with host.reported() as pool:
        pool.take(a_report(1, 2, is_whole=True))
        pool.take(a_report(3))
        with pytest.raises(InvalidRequest, match="at most 3"):
            pool.take(a_report(4))
        pool.take(a_report(4, evicted=[1]))
