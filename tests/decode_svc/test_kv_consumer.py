"""Decode starts at token two once the blocks are copied, and computes the prompt if they cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from decode_svc.kv_consumer import KVConsumer
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.messages import AbortRequest, ImportSlab, MapRegion, Recompute, Reserved, StartDecode, UnmapRegion
from tandem_runtime.errors import Cancelled, InternalError, KvCorrupt
from tandem_runtime.kv.client import KvClient
from tandem_worker.engine_link import EngineRegions
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, GatewayStream, RequestTable
from tandem_worker.settings import WorkerSettings
from tests.kv_transfer_svc.host import Host, nothing_is_left, running_host, running_writer
from tests.kv_transfer_svc.writer import Writer
from tests.tandem_worker.kv_harness import NUM_TOKENS, FollowedLink, a_handle, a_request, until
from tests.tandem_worker.scripted_engine import LAYOUT, ScriptedEngine, output, ready


class RecordingStream(GatewayStream):
    """Records the outputs sent to a gateway."""

    def __init__(self, sent: list[pb.TokenOutput]) -> None:
        super().__init__()
        self._sent = sent

    def send(self, event: pb.Event) -> None:
        self._sent.extend(event.step.outputs)


class Harness:
    def __init__(self, host: Host, writer: Writer, settings: WorkerSettings) -> None:
        self.host = host
        self.writer = writer
        self.engine = ScriptedEngine()
        self.engine.answer = self.answer
        self.import_error = ""
        self.link = FollowedLink(host)
        self.requests = RequestTable()
        self.emitted: list[pb.TokenOutput] = []
        self.finished: list[str] = []
        regions = EngineRegions(self.engine, self.link)
        self.connector = KVConsumer(self.engine, self.link, regions, self.requests, settings)
        self.connector.on_ready(ready(), ())

    def answer(self, command: messages.Command) -> None:
        """Report every slab as imported, or `import_error`."""
        if isinstance(command, ImportSlab):
            num_bytes = 0 if self.import_error else sum(extent.num_bytes for extent in command.extents)
            imported = messages.SlabImported(command.request_id, command.slab_index, num_bytes, self.import_error)
            asyncio.get_running_loop().call_soon(self.connector.on_imported, imported)

    async def reserve(self, **handle: Any) -> pb.KvHandle:
        made = a_handle(self.writer, **handle)
        await self.writer.client.reserve(made, self.writer.region_id, kv_layout(LAYOUT))
        return made

    async def seal_all(self, handle: pb.KvHandle, **first: Any) -> None:
        closing = kv.Closed(num_blocks=4, first_tokens=[kv.FirstToken(token_id=7, **first)])
        slabs = [self.writer.slab(0, 0, [5, 3]), self.writer.slab(1, 2, [1, 2])]
        await self.writer.client.seal(handle, slabs, closing)

    def begin(self, request: ActiveRequest, num_cached_blocks: int = 0) -> ActiveRequest:
        request.stream = RecordingStream(self.emitted)
        request.on_end.append(lambda error: self.finished.append(request.key) if error is None else None)
        self.requests.add(request)
        self.connector.on_reserved(request, Reserved(request.key, num_cached_blocks))
        return request

    async def sent(self, kind: type[Any]) -> Any:
        """Wait for a command of that kind."""
        await until(lambda: bool(self.engine.sent_of(kind)))
        return self.engine.sent_of(kind)[0]


@asynccontextmanager
async def harness(folder: Path, **settings: Any) -> AsyncIterator[Harness]:
    async with running_host(folder) as host, running_writer(host) as writer:
        here = Harness(host, writer, replace(WorkerSettings(), **settings))
        await here.link.wait_client()
        try:
            yield here
        finally:
            await here.connector.close()
            await here.link.close()


async def test_the_last_block_sets_the_request_going_at_token_two(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        assert await here.sent(StartDecode) == StartDecode("r.0", [7])
        kinds = [type(command).__name__ for command in here.engine.sent]
        assert kinds == ["MapRegion", "ImportSlab", "ImportSlab", "StartDecode"]
        (first,) = here.emitted
        assert (list(first.token_ids), first.position) == ([7], NUM_TOKENS)
        assert (request.ledger.num_bytes_pulled, request.ledger.transport) == (4 * 8192, "shm")
        await until(lambda: nothing_is_left(here.host))


async def test_blocks_that_are_cached_here_are_not_pulled(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        handle = await here.reserve()
        request = here.begin(a_request(handle), num_cached_blocks=3)
        await here.seal_all(handle)
        await here.sent(StartDecode)
        (imported,) = here.engine.sent_of(ImportSlab)
        assert (imported.first_block, [extent.slot for extent in imported.extents]) == (3, [2])
        assert request.ledger.num_bytes_pulled == 8192


async def test_an_answer_that_is_over_with_its_first_token_never_runs(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        handle = await here.reserve()
        here.begin(a_request(handle))
        await here.seal_all(handle, finish_reason=pb.FINISH_REASON_STOP)
        assert await here.sent(AbortRequest) == AbortRequest("r.0")
        assert here.finished == ["r.0"] and here.emitted[0].HasField("ledger")
        await until(lambda: nothing_is_left(here.host))


async def test_what_had_to_be_computed_after_all_is_in_the_ledger(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        request = a_request(await here.reserve())
        wire = pb.TokenOutput()
        last = msgspec.structs.replace(output("r.0", NUM_TOKENS, [7], is_last=True), num_computed_tokens=16)
        here.connector.on_output(request, last, wire)
        assert wire.ledger.num_reprefill_tokens == 16


@pytest.mark.parametrize("failure", ["the writer aborts", "a slot was reused", "no such choice"])
async def test_a_cache_that_cannot_be_had_is_computed_here(tmp_path: Path, failure: str) -> None:
    async with harness(tmp_path) as here:
        handle = await here.reserve()
        if failure == "a slot was reused":
            here.import_error = "generation 2, sealed was 1"
        here.begin(a_request(handle, choice_index=1 if failure == "no such choice" else 0))
        if failure == "the writer aborts":
            await here.writer.client.abort(handle, InternalError("prefill failed"))
        else:
            await here.seal_all(handle)
        assert await here.sent(Recompute) == Recompute("r.0")
        assert here.engine.sent_of(StartDecode) == [] and here.emitted == []
        assert here.connector.counters()["kv_pull_failures"] == 1
        await until(lambda: nothing_is_left(here.host))


async def test_a_region_that_could_not_be_read_is_mapped_anew(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        here.import_error = "region is not mapped"
        handle = await here.reserve()
        here.begin(a_request(handle, "first"))
        await here.seal_all(handle)
        await here.sent(Recompute)
        here.import_error = ""
        handle = await here.reserve()
        here.begin(a_request(handle, "second"))
        await here.seal_all(handle)
        await here.sent(StartDecode)
        assert len(here.engine.sent_of(MapRegion)) == 2
        assert here.engine.sent_of(UnmapRegion) == [UnmapRegion(here.writer.region_id)]


async def test_a_request_does_not_wait_for_a_kv_service_that_was_lost(tmp_path: Path) -> None:
    """The client is closed during the watch, which gRPC reports as a cancellation of the pull's task."""
    async with harness(tmp_path) as here, running_host(tmp_path) as other:
        handle = await here.reserve()
        here.begin(a_request(handle))
        await until(lambda: here.host.store.num_live == 1 and _num_readers(here.host) == 1)
        here.link.move(other)
        assert await here.sent(Recompute) == Recompute("r.0")


async def test_without_a_kv_service_the_prompt_is_computed_at_once(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        nobody = FollowedLink(None)
        alone = KVConsumer(here.engine, nobody, EngineRegions(here.engine, nobody), RequestTable(), WorkerSettings())
        alone.on_ready(ready(), ())
        alone.on_reserved(a_request(a_handle(here.writer)), Reserved("r.0", 0))
        assert await here.sent(Recompute) == Recompute("r.0")
        await alone.close()


async def test_a_request_that_ends_while_it_pulls_gives_its_lease_back(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await until(lambda: _num_readers(here.host) == 1)
        here.connector.on_end(request, Cancelled("the client left"))
        await asyncio.wait_for(here.connector.wait_drained(), 10)
        await until(lambda: nothing_is_left(here.host))
        assert here.engine.sent == []


async def test_a_lease_is_released_at_its_holder_if_the_kv_service_of_this_host_is_gone(tmp_path: Path) -> None:
    """Its writer may wait for us before it reuses its memory."""
    async with harness(tmp_path) as here:
        async with running_host(tmp_path) as ours:
            here.link.move(ours)
            await until(lambda: here.link.address == ours.address)
            handle = await here.reserve()
            here.begin(a_request(handle))
            await until(lambda: _num_readers(here.host) == 1)  # ours watches for us
        here.link.move(None)
        await here.sent(Recompute)
        await asyncio.wait_for(here.connector.wait_drained(), 10)
        await until(lambda: nothing_is_left(here.host))


async def test_a_region_nobody_reads_any_more_is_unmapped(tmp_path: Path) -> None:
    """The owner may be dead: the mapping alone would keep all of its memory."""
    async with harness(tmp_path) as here:
        here.connector.copier.regions.idle_seconds = 0.05
        handle = await here.reserve()
        here.begin(a_request(handle))
        await here.seal_all(handle)
        assert await here.sent(UnmapRegion) == UnmapRegion(here.writer.region_id)


@pytest.mark.parametrize("is_corrupt", [False, True])
async def test_over_grpc_the_bytes_pass_through_a_region_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_corrupt: bool
) -> None:
    async def corrupt(self: KvClient, handle: Any, reader: Any, slab: Any, into: memoryview, first: int = 0) -> int:
        blocks = [into[:10]]
        raise KvCorrupt(f"a chunk too short, into {len(blocks)} views")

    if is_corrupt:
        monkeypatch.setattr(KvClient, "read", corrupt)
    async with harness(tmp_path, kv_transport="grpc") as here:
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        if is_corrupt:
            await here.sent(Recompute)
        else:
            await here.sent(StartDecode)
            regions = [command.region_id for command in here.engine.sent_of(MapRegion)]
            assert [command.region_id for command in here.engine.sent_of(UnmapRegion)] == regions
            assert len(regions) == 2 and here.writer.region_id not in regions
            assert (request.ledger.transport, request.ledger.num_bytes_pulled) == ("grpc", 4 * 8192)
        await until(lambda: nothing_is_left(here.host))
        await until(lambda: _num_staged() == 0)


def _num_staged() -> int:
    """Return the number of staging regions that are open in this process."""
    folder = Path("/proc/self/fd")
    links = [str(entry.readlink()) for entry in folder.iterdir() if entry.is_symlink()]
    return sum("tandem-staged" in link for link in links)


def _num_readers(host: Host) -> int:
    return sum(record.machine.num_leases for record in host.store.live())


async def test_decode_goes_on_before_the_engine_has_answered_and_the_lease_ends_after(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        here.engine.answer = lambda command: None
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        await here.sent(StartDecode)
        assert request.ledger.transfer_end_ns > 0
        assert not nothing_is_left(here.host)
        for command in here.engine.sent_of(ImportSlab):
            here.answer(command)
        await until(lambda: nothing_is_left(here.host))
        assert here.connector.counters() == {"kv_pulls": 1, "kv_pull_failures": 0, "kv_bytes_pulled": 4 * 8192}


async def test_a_copy_that_fails_after_the_start_is_counted_once_and_moves_nothing(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        here.engine.answer = lambda command: None
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        await here.sent(StartDecode)
        here.import_error = "slot 5 was handed out again"
        for command in here.engine.sent_of(ImportSlab):
            here.answer(command)
        await until(lambda: nothing_is_left(here.host))
        assert here.connector.counters() == {"kv_pulls": 1, "kv_pull_failures": 1, "kv_bytes_pulled": 0}
        assert not here.engine.sent_of(Recompute)
        assert request.ledger.num_bytes_pulled == 0


async def test_an_engine_that_dies_with_copies_unanswered_keeps_no_lease(tmp_path: Path) -> None:
    async with harness(tmp_path) as here:
        here.engine.answer = lambda command: None
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        await here.sent(StartDecode)
        here.connector.on_end(request, InternalError("the engine has ended"))
        await until(lambda: nothing_is_left(here.host))
        await here.connector.wait_drained()
        assert here.connector.counters()["kv_pull_failures"] == 0


async def test_a_prompt_longer_than_the_arena_is_copied_in_windows_and_nothing_is_computed(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path, arena_bytes=2 * 8192) as host,
        running_host(tmp_path) as far,
        running_writer(far) as writer,
    ):
        here = Harness(host, writer, WorkerSettings())
        await here.link.wait_client()
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        await here.seal_all(handle)
        assert await here.sent(StartDecode) == StartDecode("r.0", [7])
        imported = here.engine.sent_of(ImportSlab)
        assert [(each.first_block, len(each.extents)) for each in imported] == [(0, 1), (1, 1), (2, 1), (3, 1)]
        assert here.engine.sent_of(Recompute) == []
        assert request.ledger.num_bytes_pulled == 4 * 8192 > host.arena.total_bytes
        await until(lambda: nothing_is_left(host) and nothing_is_left(far))
        await here.connector.close()
        await here.link.close()


async def test_a_window_that_could_not_be_copied_ends_the_pull_at_once(tmp_path: Path) -> None:
    """No further window would come: the request must not wait for its deadline."""
    async with (
        running_host(tmp_path, arena_bytes=2 * 8192) as host,
        running_host(tmp_path) as far,
        running_writer(far) as writer,
    ):
        here = Harness(host, writer, WorkerSettings())
        await here.link.wait_client()
        here.import_error = "generation 2, sealed was 1"
        handle = await here.reserve()
        here.begin(a_request(handle))
        await here.seal_all(handle)
        assert await here.sent(Recompute) == Recompute("r.0")
        await until(lambda: nothing_is_left(host) and nothing_is_left(far))
        await here.connector.close()
        await here.link.close()
