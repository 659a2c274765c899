"""Random sequences of messages: region connections, calls of a KV service, and the events of a worker's stream.

Each machine has a model of a few lines beside the real thing, and both must agree after every step.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer_svc.arena import Arena
from kv_transfer_svc.region_table import RegionTable
from kv_transfer_svc.service import KvTransferService
from kv_transfer_svc.store import HandleStore
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_runtime.errors import KvNotFound, TandemError, Unauthenticated
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.kv.region_server import RegionServer
from tandem_runtime.kv.regions import RegionOffer, _ask
from tandem_runtime.kv.shared_region import SharedRegion
from tests.control_plane.fleet.test_worker_links import Heard, linked, submit
from tests.control_plane.scripted_worker import AttachStream, ScriptedWorker
from tests.descriptors import OpenFiles
from tests.kv_transfer_svc.host import until
from tests.kv_transfer_svc.layout import BLOCK_BYTES, BLOCK_TOKENS, KEYS, SIGNER, a_layout

_STEPS = settings(
    max_examples=15, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class _OnALoop(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 10))

    def teardown(self) -> None:
        self.run(self.end())
        self.loop.close()

    async def end(self) -> None:
        """Stop what was started."""


# ------------------------------------------------------------------------------------------------------------- regions


class RegionConnections(_OnALoop):
    """A region can be fetched exactly while the connection that lent it last is open."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.regions = RegionTable(lambda offer: None)
        self.server = RegionServer(Path(self.folder.name) / "s", self.regions)
        self.run(self.server.start())
        self.memory = SharedRegion.create("test", 4096, 1)
        self.connections: list[PacketSocket] = []
        self.lender: dict[str, PacketSocket] = {}
        self.files = OpenFiles()

    @rule()
    def connect(self) -> None:
        self.connections.append(self.run(PacketSocket.connect(str(self.server.path))))

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), region=st.sampled_from("ab"), incarnation=st.sampled_from("xy"))
    def offer(self, data: st.DataObject, region: str, incarnation: str) -> None:
        connection = data.draw(st.sampled_from(self.connections))
        offer = RegionOffer(region, incarnation, self.memory.total_bytes, 1, 4096, self.memory.generations_offset)
        self.run(_ask(connection, {"op": "offer", **offer.message}, self.memory.fd))
        self.lender[region] = connection

    @precondition(lambda self: self.connections)
    @rule(
        data=st.data(),
        message=st.dictionaries(
            st.sampled_from(["op", "region_id", "incarnation", "num_slots", "generations_offset", "kind", "x"]),
            st.one_of(
                st.sampled_from(["offer", "fetch", "c", "device"]), st.integers(), st.none(), st.lists(st.integers())
            ),
        ),
        num_descriptors=st.integers(0, 2),
    )
    def nonsense(self, data: st.DataObject, message: dict[str, object], num_descriptors: int) -> None:
        connection = data.draw(st.sampled_from(self.connections))
        try:
            self.run(_ask(connection, {"op": "", **message}, *([self.memory.fd] * num_descriptors)))
        except TandemError:
            return
        raise AssertionError(f"{message} was accepted")

    @precondition(lambda self: self.connections)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(self.connections))
        self.connections.remove(connection)
        connection.close()
        self.lender = {region: lender for region, lender in self.lender.items() if lender is not connection}
        self.run(self.until_the_server_noticed())

    async def until_the_server_noticed(self) -> None:
        await until(lambda: len(self.server._tasks) <= 1 + len(self.connections))

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), region=st.sampled_from("abc"))
    def fetch(self, data: st.DataObject, region: str) -> None:
        connection = data.draw(st.sampled_from(self.connections))
        try:
            _, (fd,) = self.run(_ask(connection, {"op": "fetch", "region_id": region}))
        except KvNotFound:
            assert region not in self.lender
            return
        os.close(fd)
        assert region in self.lender

    @invariant()
    def the_table_has_what_is_lent(self) -> None:
        assert {each.offer.region_id for each in self.regions} == set(self.lender)
        # A connection has two ends here; a region's mapping keeps a descriptor beside the region's own.
        expected = 2 * len(self.connections) + 2 * len(self.lender)
        with suppress(TimeoutError):  # other threads of this process open files for a moment; what is lost stays open
            self.run(until(lambda: self.files.num_more() == expected))
        assert self.files.num_more() == expected

    async def end(self) -> None:
        for connection in self.connections:
            connection.close()
        await self.server.close()
        self.regions.close()
        self.memory.close()
        self.folder.cleanup()


TestRegionConnections = RegionConnections.TestCase
TestRegionConnections.settings = _STEPS


# ------------------------------------------------------------------------------------------------------------ KV calls

_READERS = st.sampled_from(["reader-1", "reader-2", "reader-3"])
_HANDLES = st.sampled_from([0, 1])
_FORGERIES = st.sampled_from(["num_readers", "num_tokens", "deadline_unix_ms", "attempt", "signature", "handle_id"])


class KvCalls(_OnALoop):
    """No forged handle is accepted, a sealed slab never changes, and in the end nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.run(self.start())

    async def start(self) -> None:
        self.store = HandleStore(clock=lambda: self.now)
        self.arena = Arena("arena", 4096)
        self.service = KvTransferService(
            self.store, self.arena, "holder-1", lambda: KEYS, pb.StatsReply, host_cache=None
        )
        self.service.set_address("127.0.0.1:8650")
        self.memory = SharedRegion.create("test", 4 * BLOCK_BYTES, 4)
        offer = RegionOffer("region", "writer", self.memory.total_bytes, 4, BLOCK_BYTES, self.memory.generations_offset)
        self.store.regions.take(offer, os.dup(self.memory.fd), None)
        self.handles = [self.minted(index) for index in range(2)]
        self.sealed: dict[int, list[bytes]] = {0: [], 1: []}

    def minted(self, index: int) -> pb.KvHandle:
        handle = pb.KvHandle(
            handle_id=bytes([index]) * 16,
            request_id=f"request-{index}",
            prefill_incarnation="writer",
            num_tokens=2 * BLOCK_TOKENS,
            num_readers=1 + index,
            deadline_unix_ms=int((self.now + 300) * 1000),
        )
        return SIGNER.sign(handle)

    def slab(self, index: int, slot: int) -> kv.Slab:
        extent = pb.Extent(
            kind=pb.MEMORY_KIND_HOST,
            region_id="region",
            offset=slot * BLOCK_BYTES,
            num_bytes=BLOCK_BYTES,
            slot=slot,
        )
        return kv.Slab(index=index, first_block=index, num_blocks=1, num_layers=2, extents=[extent])

    def call(self, method: str, request: Any) -> Any:
        """Make a call that may be refused."""
        try:
            return self.run(getattr(self.service, method)(request, None))
        except TandemError:
            return None

    @rule(handle=_HANDLES)
    def reserve(self, handle: int) -> None:
        request = kv.ReserveRequest(handle=self.handles[handle], region_id="region", layout=a_layout(), lease_ms=5000)
        self.call("Reserve", request)

    @rule(handle=_HANDLES, index=st.integers(0, 3), slot=st.integers(0, 5), close=st.booleans())
    def seal(self, handle: int, index: int, slot: int, close: bool) -> None:
        slab = self.slab(index, slot)
        request = kv.SealRequest(handle=self.handles[handle], slabs=[slab], close=close, num_blocks=2)
        if self.call("Seal", request) is not None and index == len(self.sealed[handle]):
            self.sealed[handle].append(slab.SerializeToString(deterministic=True))

    @rule(handle=_HANDLES, reader=_READERS)
    def renew(self, handle: int, reader: str) -> None:
        self.call("Renew", kv.RenewRequest(handles=[self.handles[handle]], reader_id=reader))

    @rule(handle=_HANDLES, reader=_READERS, all=st.booleans())
    def release(self, handle: int, reader: str, all: bool) -> None:
        self.call("Release", kv.ReleaseRequest(handle=self.handles[handle], reader_id=reader, all=all))

    @rule(handle=_HANDLES)
    def abort(self, handle: int) -> None:
        self.call("Abort", kv.AbortRequest(handle=self.handles[handle]))

    @rule(handle=_HANDLES, reader=_READERS)
    def watch(self, handle: int, reader: str) -> None:
        """See the slabs that were sealed, in order."""
        request = kv.WatchRequest(handle=self.handles[handle], reader_id=reader, layout=a_layout())
        seen = self.run(self.events(request))
        slabs = [event.slab.SerializeToString(deterministic=True) for event in seen if event.HasField("slab")]
        assert slabs == self.sealed[handle][: len(slabs)]

    async def events(self, request: kv.WatchRequest) -> list[kv.WatchEvent]:
        """Return the events that are there now."""
        events: list[kv.WatchEvent] = []
        stream = self.service.Watch(request, None)

        async def read() -> None:
            async for event in stream:
                events.append(event)

        reading = asyncio.create_task(read())
        for _ in range(10):
            await asyncio.sleep(0)
        reading.cancel()
        (ended,) = await asyncio.gather(reading, return_exceptions=True)
        assert ended is None or isinstance(ended, (asyncio.CancelledError, TandemError)), repr(ended)
        return events

    @rule(handle=_HANDLES, field=_FORGERIES, method=st.sampled_from(["Reserve", "Seal", "Renew", "Release", "Abort"]))
    def forge(self, handle: int, field: str, method: str) -> None:
        forged = pb.KvHandle()
        forged.CopyFrom(self.handles[handle])
        value = getattr(forged, field)
        setattr(forged, field, value + 1 if isinstance(value, int) else bytes(len(value) - 1) + b"\1")
        num_live = self.store.num_live
        try:
            self.run(getattr(self.service, method)(self.forged_request(method, forged), None))
        except Unauthenticated:
            assert self.store.num_live == num_live
            return
        raise AssertionError(f"{method} accepted a handle with another {field}")

    def forged_request(self, method: str, forged: pb.KvHandle) -> Any:
        match method:
            case "Reserve":
                return kv.ReserveRequest(handle=forged, region_id="region", layout=a_layout(), lease_ms=5000)
            case "Seal":
                return kv.SealRequest(handle=forged, slabs=[self.slab(0, 0)])
            case "Renew":
                return kv.RenewRequest(handles=[forged], reader_id="reader-1")
            case "Release":
                return kv.ReleaseRequest(handle=forged, all=True)
        return kv.AbortRequest(handle=forged)

    @rule(seconds=st.sampled_from([1, 6, 20]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.service.sweep()

    @invariant()
    def the_bytes_kept_are_those_of_live_handles(self) -> None:
        assert 0 <= self.store.leased_bytes <= 8 * BLOCK_BYTES
        assert self.store.num_live <= len(self.handles)

    async def end(self) -> None:
        self.now += 1000
        self.service.sweep()
        assert (self.store.num_live, self.store.leased_bytes) == (0, 0)
        await self.service.puller.close()
        self.store.regions.close()
        self.memory.close()
        self.arena.close()


TestKvCalls = KvCalls.TestCase
TestKvCalls.settings = _STEPS


# ---------------------------------------------------------------------------------------------------- a worker's stream

_KEYS = st.tuples(st.sampled_from(["r-0", "r-1", "r-2", "of another", ""]), st.integers(0, 1))


def _events() -> st.SearchStrategy[pb.Event]:
    error = st.builds(pb.ErrorDetail, code=st.integers(0, 40), message=st.text(max_size=5))
    output = st.builds(
        lambda key, position, tokens, reason: pb.TokenOutput(
            request_id=key[0], attempt=key[1], position=position, token_ids=tokens, finish_reason=reason
        ),
        _KEYS,
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(0, 2**32 - 1), max_size=3),
        st.integers(0, 9),
    )
    return st.one_of(
        st.just(pb.Event()),
        st.builds(lambda outputs: pb.Event(step=pb.StepBatch(outputs=outputs)), st.lists(output, max_size=4)),
        st.builds(lambda key: pb.Event(accepted=pb.Accepted(request_id=key[0], attempt=key[1])), _KEYS),
        st.builds(
            lambda key, e: pb.Event(refused=pb.Refused(request_id=key[0], attempt=key[1], error=e)), _KEYS, error
        ),
        st.builds(lambda key, e: pb.Event(failed=pb.Failed(request_id=key[0], attempt=key[1], error=e)), _KEYS, error),
        st.just(pb.Event(hello=pb.AttachHello(worker_incarnation="another life"))),
        st.builds(
            lambda number, data, is_last, e: pb.Event(
                tables=pb.TablesPart(number=number, data=data, is_last=is_last, error=e)
            ),
            st.integers(0, 2),
            st.binary(max_size=8),
            st.booleans(),
            st.none() | error,
        ),
    )


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(events=st.lists(_events(), max_size=20))
def test_each_call_of_a_worker_ends_once_whatever_its_stream_carries(events: Sequence[pb.Event]) -> None:
    asyncio.run(asyncio.wait_for(_run_events(events), 20))


async def _run_events(events: Sequence[pb.Event]) -> None:
    """Submit three requests, send the events, break the stream: every call hears its own events and one end.

    The auditor's question ends too, with tables or a typed error.
    """
    arrived: list[AttachStream] = []
    all_here = asyncio.Event()

    async def collect(worker: ScriptedWorker, attach: AttachStream, request: pb.Submit) -> None:
        arrived.append(attach)
        if len(arrived) == 3:
            all_here.set()

    async with linked(collect) as (scripted, link, _registry):
        scripted.sends_tables = False
        heard = {(f"r-{index}", 0): Heard() for index in range(3)}
        for (request_id, attempt), sink in heard.items():
            link.submit(submit(request_id, attempt), sink)
        await all_here.wait()
        await until(lambda: link.tables.is_open)
        question = asyncio.create_task(link.tables.ask(10, 20.0))
        await scripted.until(lambda worker: bool(worker.questions))
        for event in events:
            arrived[0].events.put_nowait(event)
        arrived[0].events.put_nowait(None)
        for sink in heard.values():
            await sink.until(lambda words: "ended" in words)
            assert Counter(sink.words)["ended"] == 1 and sink.words[-1] == "ended"
        with suppress(TandemError):
            assert isinstance(await question, TablesReply)
        assert link.num_requests == 0
        for key, sink in heard.items():
            assert sink.words[:-1] == _expected(key, events)


def _expected(key: tuple[str, int], events: Sequence[pb.Event]) -> list[str]:
    """Return what a call hears before its end."""
    words = []
    for event in events:
        kind = event.WhichOneof("kind")
        if kind == "accepted" and (event.accepted.request_id, event.accepted.attempt) == key:
            words.append("accepted")
        elif kind == "step":
            of_key = [each for each in event.step.outputs if (each.request_id, each.attempt) == key]
            words += [f"tokens {len(each.token_ids)}" for each in of_key]
        elif kind in ("refused", "failed"):
            end = getattr(event, kind)
            if (end.request_id, end.attempt) == key:
                break
    return words
