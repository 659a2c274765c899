"""Prefill seals every computed block, keeps it for its readers, and releases it in every case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import prefill_svc
from prefill_svc.kv_producer import KVProducer
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc as kv_grpc
from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import ReleaseHeld, ReleaseSlabs, Reserved, SealedBlocks
from tandem_runtime.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, TandemError, Unsupported
from tandem_runtime.kv.client import MAX_BLOCKS_PER_CALL, KvClient
from tandem_runtime.kv_handle import HandleState
from tandem_runtime.server import GrpcServer
from tandem_worker.engine_link import EngineRegions
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, RequestTable
from tandem_worker.settings import WorkerSettings
from tests.kv_transfer_svc.host import Host, a_client, nothing_is_left, running_host, running_writer
from tests.kv_transfer_svc.writer import Writer
from tests.tandem_worker.kv_harness import NUM_TOKENS, FollowedLink, a_handle, a_request, until
from tests.tandem_worker.scripted_engine import LAYOUT, ScriptedEngine, output, ready


class Harness:
    def __init__(self, host: Host, writer: Writer) -> None:
        self.host = host
        self.writer = writer
        self.engine = ScriptedEngine()
        self.link = FollowedLink(host)
        self.connector = KVProducer(
            self.engine, self.link, EngineRegions(self.engine, self.link), RequestTable(), WorkerSettings()
        )

    async def load(self, max_held_slots: int = 0) -> None:
        region = self.writer.region
        loaded = msgspec.structs.replace(ready(region_id="worker-1"), max_held_slots=max_held_slots)
        self.connector.on_ready(loaded, [os.dup(region.fd)])
        await asyncio.wait_for(self.connector.wait_ready(), 10)

    def handle(self, num_readers: int = 1, seconds: float = 60.0) -> pb.KvHandle:
        return a_handle(self.writer, num_readers, seconds, prefill="worker-1")

    def begin(self, handle: pb.KvHandle, name: str = "r", num_choices: int = 1) -> ActiveRequest:
        request = a_request(handle, name, choice_seeds=range(num_choices))
        self.connector.on_reserved(request, Reserved(request.key, 0))
        return request

    def compute(self, request: ActiveRequest, first_block: int, slots: list[int], *, is_last: bool = False) -> None:
        sealed = SealedBlocks(request.key, first_block, slots, [0] * len(slots), is_last, region_id="worker-1")
        self.connector.on_sealed(sealed)

    def sample(self, request: ActiveRequest, token_id: int = 7, choice_index: int = 0) -> None:
        wire = pb.TokenOutput(token_ids=[token_id], choice_index=choice_index)
        self.connector.on_output(request, output(request.key, NUM_TOKENS, [token_id], is_last=True), wire)

    def finish(self, request: ActiveRequest) -> None:
        self.sample(request)
        self.compute(request, 0, [0, 1, 2, 3], is_last=True)
        self.connector.on_end(request, None)

    async def released(self, *keys: str) -> None:
        await until(lambda: {command.request_id for command in self.engine.sent_of(ReleaseHeld)} == set(keys))


@asynccontextmanager
async def harness(folder: Path, max_held_slots: int = 0) -> AsyncIterator[Harness]:
    """Yield a prefill worker that has lent its region to a real KV service."""
    async with running_host(folder) as host, running_writer(host) as writer:
        here = Harness(host, writer)
        await here.load(max_held_slots)
        try:
            yield here
        finally:
            await here.connector.close()
            await here.link.close()


async def watch(client: KvClient, handle: pb.KvHandle) -> list[kv.WatchEvent]:
    async with asyncio.timeout(20):
        return [event async for event in client.watch(handle, "reader", kv_layout(LAYOUT))]


async def test_blocks_are_seen_as_they_come_and_given_back_when_their_reader_releases(tmp_path: Path) -> None:
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        handle = here.handle(num_readers=1)
        request = here.begin(handle, num_choices=2)
        events = reader.watch(handle, "reader", kv_layout(LAYOUT))
        # 1. two blocks are sealed while the rest is computed
        here.compute(request, 0, [5, 2])
        first = await asyncio.wait_for(anext(events), 10)
        assert [(extent.slot, extent.region_id) for extent in first.slab.extents] == [(5, "worker-1"), (2, "worker-1")]
        # 2. the rest, with one first token per choice, closes the handle
        here.sample(request, 7, choice_index=1)
        here.sample(request, 6, choice_index=0)
        here.compute(request, 2, [3, 1], is_last=True)
        here.connector.on_end(request, None)
        rest = [event async for event in events]
        assert rest[0].slab.first_block == 2
        assert [token.token_id for token in rest[1].closed.first_tokens] == [6, 7]
        # 3. the engine keeps the blocks until the reader is done
        assert here.engine.sent == []
        await reader.release(handle, "reader")
        await here.released("r.0")
        await asyncio.wait_for(here.connector.wait_drained(), 10)
        await until(lambda: nothing_is_left(here.host))


async def test_a_prompt_that_broke_is_told_to_its_reader_at_once(tmp_path: Path) -> None:
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        handle = here.handle()
        request = here.begin(handle)
        here.compute(request, 0, [5])
        watching = asyncio.create_task(watch(reader, handle))
        await until(lambda: here.host.store.num_live == 1)
        here.connector.on_end(request, InternalError("the step broke"))
        with pytest.raises(TandemError, match="the step broke"):
            await watching
        await here.released("r.0")
        await until(lambda: nothing_is_left(here.host))


async def test_a_handle_that_ended_before_it_was_reserved_gives_its_blocks_back(tmp_path: Path) -> None:
    """The client left before the reservation: the gateway's release came first."""
    async with harness(tmp_path) as here, a_client(here.host) as gateway:
        handle = here.handle()
        await gateway.release_all(handle)
        request = here.begin(handle)
        await here.released("r.0")
        here.connector.on_end(request, Cancelled("the client left"))
        await until(lambda: nothing_is_left(here.host))


async def test_the_gateways_release_of_all_gives_the_blocks_back(tmp_path: Path) -> None:
    async with harness(tmp_path) as here, a_client(here.host) as gateway:
        handle = here.handle(num_readers=3)
        here.finish(here.begin(handle))
        await until(lambda: here.connector.counters()["kv_slabs_sealed"] == 1)
        await gateway.release_all(handle)
        await here.released("r.0")


async def test_blocks_go_back_when_the_kv_service_is_another_and_new_prompts_are_sealed_there(tmp_path: Path) -> None:
    async with harness(tmp_path) as here, running_host(tmp_path) as other:
        here.finish(here.begin(here.handle(), "old"))
        await until(lambda: here.connector.counters()["kv_slabs_sealed"] == 1)
        here.link.move(other)
        await here.released("old.0")
        async with running_writer(other) as elsewhere, a_client(other) as reader:
            handle = a_handle(elsewhere, prefill="worker-1")
            here.finish(here.begin(handle, "new"))
            assert len(await watch(reader, handle)) == 2


class Hanging(kv_grpc.KvTransferServiceServicer):
    """A KV service that accepts calls and never replies."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def Reserve(self, request: kv.ReserveRequest, context: object) -> kv.ReserveReply:
        self.entered.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing ever sets it")


async def test_a_seal_under_way_when_the_kv_service_is_lost_gives_its_blocks_back(tmp_path: Path) -> None:
    """The client is closed during the call, which gRPC reports as a cancellation of the publisher's task."""
    hanging = Hanging()  # type: ignore[abstract]
    server = GrpcServer("127.0.0.1:0", lambda grpc: kv_grpc.add_KvTransferServiceServicer_to_server(hanging, grpc), [])
    async with harness(tmp_path) as here, running_host(tmp_path) as asleep, running_host(tmp_path) as other:
        asleep.address = await server.start()
        here.link.move(asleep)
        await until(lambda: here.link.address == asleep.address)
        request = here.begin(here.handle())
        await asyncio.wait_for(hanging.entered.wait(), 10)
        here.link.move(other)
        await here.released("r.0")
        assert here.connector.counters()["kv_seal_failures"] == 1
        here.connector.on_end(request, None)
        await server.stop(0)


async def test_an_abort_that_cannot_be_delivered_now_is_delivered_later(tmp_path: Path) -> None:
    """Otherwise its reader would wait until the deadline."""
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        handle = here.handle()
        host, here.link.host = here.host, None
        await here.link.disconnect()
        request = here.begin(handle)
        await here.released("r.0")  # it could not seal
        here.connector.on_end(request, None)
        here.link.move(host)
        await here.link.wait_lent()
        with pytest.raises(TandemError, match="no KV service"):
            await watch(reader, handle)


async def test_an_abort_at_a_service_that_is_stopped_is_delivered_once_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call's own deadline was taken for a refusal: the reader waited until the request's."""
    monkeypatch.setattr("prefill_svc.pinned_blocks._RETRY_SECONDS", 0.01)
    abort, num_calls = KvClient.abort, 0

    async def stopped_at_first(self: KvClient, *arguments: Any) -> HandleState:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise DeadlineExceeded("DEADLINE_EXCEEDED: Deadline Exceeded")
        return await abort(self, *arguments)

    monkeypatch.setattr(KvClient, "abort", stopped_at_first)
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        handle = here.handle()
        watching = asyncio.create_task(watch(reader, handle))
        request = here.begin(handle)
        await until(lambda: here.host.store.num_live == 1)
        here.connector._pinned.abort(request, InternalError("it could not seal"))
        with pytest.raises(TandemError, match="it could not seal"):
            await asyncio.wait_for(watching, 10)
        assert num_calls == 3
        here.connector.on_end(request, None)


async def test_a_reader_is_told_at_once_that_the_writer_has_hung_up(tmp_path: Path) -> None:
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        watching = asyncio.create_task(watch(reader, here.handle()))
        await until(lambda: here.host.store.num_live == 1)
        here.link.host = None
        await here.link.disconnect()
        with pytest.raises(TandemError, match="is gone"):
            await watching


async def test_a_prompt_whose_seal_outlives_its_deadline_gives_its_blocks_back(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        request = a_request(here.handle(), seconds=0.1)
        here.connector.on_reserved(request, Reserved(request.key, 0))
        await here.released("r.0")


async def test_a_request_without_handle_is_refused(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        with pytest.raises(InvalidRequest, match="handle"):
            here.connector.mode(pb.Submit())


async def test_an_engine_that_lends_no_region_is_refused_by_name() -> None:
    engine, link = ScriptedEngine(), FollowedLink(None)
    connector = KVProducer(engine, link, EngineRegions(engine, link), RequestTable(), WorkerSettings())
    with pytest.raises(Unsupported, match="region"):
        connector.on_ready(ready(), [])


async def test_closing_leaves_no_task_behind(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        here.begin(here.handle())
        await here.connector.close()
        await here.link.close()
        left = [task for task in asyncio.all_tasks() if _is_of_prefill(task)]
        assert left == []
        with pytest.raises(TandemError):
            here.link.client()


def _is_of_prefill(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).parent == Path(prefill_svc.__file__).parent


async def test_a_long_prompt_that_is_sealed_at_once_is_cut_into_slabs_that_the_service_takes(tmp_path: Path) -> None:
    num_blocks = 2 * MAX_BLOCKS_PER_CALL + 1
    async with harness(tmp_path) as here, a_client(here.host) as reader:
        handle = a_handle(here.writer, prefill="worker-1", num_blocks=num_blocks)
        request = here.begin(handle)
        slots = [block % 8 for block in range(num_blocks)]
        here.sample(request)
        here.compute(request, 0, slots, is_last=True)  # all of them were in prefill's cache
        here.connector.on_end(request, None)
        *slabs, closed = await watch(reader, handle)
        firsts = [(event.slab.first_block, event.slab.num_blocks) for event in slabs]
        assert firsts == [(0, 1024), (1024, 1024), (2048, 1)]
        assert [extent.slot for event in slabs for extent in event.slab.extents] == slots
        assert (closed.closed.num_slabs, closed.closed.num_blocks) == (3, num_blocks)
        await reader.release(handle, "reader")
        await here.released("r.0")
        assert here.connector.counters()["kv_seal_failures"] == 0


async def test_slots_of_a_small_region_are_given_back_as_they_are_copied_and_late_blocks_are_sealed(
    tmp_path: Path,
) -> None:
    """The engine announces the last blocks when their copies have slots: after the request's last output."""
    async with harness(tmp_path, max_held_slots=2) as here, a_client(here.host) as reader:
        handle = here.handle()
        request = here.begin(handle)
        events = reader.watch(handle, "reader", kv_layout(LAYOUT), acknowledges=True)
        here.sample(request)
        here.compute(request, 0, [5, 2])
        here.connector.on_end(request, None)
        slab = (await asyncio.wait_for(anext(events), 10)).slab
        await reader.acknowledge(handle, "reader", slab.index + 1)
        await until(lambda: here.engine.sent == [ReleaseSlabs(request.key, 2)])
        here.compute(request, 2, [2])
        here.compute(request, 3, [5], is_last=True)
        rest = [event async for event in events]
        assert [event.slab.first_block for event in rest[:-1]] in ([2], [2, 3]) and rest[-1].closed.num_blocks == 4
        await reader.release(handle, "reader")
        await here.released("r.0")
        await until(lambda: nothing_is_left(here.host))


async def test_a_handle_that_ends_while_blocks_wait_for_slots_leaves_no_publisher(tmp_path: Path) -> None:
    async with harness(tmp_path, max_held_slots=2) as here, a_client(here.host) as gateway:
        handle = here.handle()
        request = here.begin(handle)
        here.sample(request)
        here.compute(request, 0, [5, 2])
        here.connector.on_end(request, None)
        await until(lambda: here.host.store.counters["slabs_sealed"] == 1)
        await gateway.release_all(handle)
        await here.released("r.0")
        await until(lambda: not here.connector._publishers)
        here.compute(request, 2, [2, 5], is_last=True)  # it was under way
        assert here.connector.counters()["kv_seal_failures"] == 0


class Release02(kv_grpc.KvTransferServiceServicer):
    """A KV service that reports no copies."""

    def __init__(self) -> None:
        self.aborts: list[kv.AbortRequest] = []

    async def Reserve(self, request: kv.ReserveRequest, context: object) -> kv.ReserveReply:
        return kv.ReserveReply(state=kv.HANDLE_STATE_RESERVED)

    async def Abort(self, request: kv.AbortRequest, context: object) -> kv.AbortReply:
        self.aborts.append(request)
        return kv.AbortReply()


@pytest.mark.parametrize(("max_held_slots", "is_refused"), [(3, True), (4, False)])
async def test_a_service_of_release_0_2_gets_only_prompts_that_fit(
    max_held_slots: int, is_refused: bool, tmp_path: Path
) -> None:
    old = Release02()  # type: ignore[abstract]
    server = GrpcServer("127.0.0.1:0", lambda grpc: kv_grpc.add_KvTransferServiceServicer_to_server(old, grpc), [])
    async with harness(tmp_path, max_held_slots) as here, running_host(tmp_path) as other:
        other.address = await server.start()
        here.link.move(other)
        await until(lambda: here.link.address == other.address)
        request = here.begin(here.handle())
        if is_refused:
            await until(lambda: len(old.aborts) == 1)
            assert "raise --kv-staging-bytes" in old.aborts[0].reason.message
            await here.released("r.0")
        else:
            await until(lambda: bool(here.connector._publishers))
            assert not old.aborts and here.engine.sent == []
        here.connector.on_end(request, InternalError("the test ends"))
        await server.stop(0)
