"""KV services with the tables that a test gives them, and a gateway's streams to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from control_plane.audit.auditor import Auditor
from control_plane.audit.table_reader import QuestionStreams, TableReader
from control_plane.block_events import BlockEventReader
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_links import LinkPool
from control_plane.routing.sample_points import SamplePointIndex
from kv_transfer_svc.event_stream import event_stream
from kv_transfer_svc.host_points import HostPoints
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import kv_transfer_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_runtime.server import GrpcServer
from tests.control_plane.scripted_worker import kv_load, kv_service
from tests.kv_transfer_svc.host import until


class ScriptedService(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """A KV service that has the tables a test gives it."""

    def __init__(self, name: str = "kv-0", *, answers_on_stream: bool = True) -> None:
        self.name = name
        self.tables = TablesReply(incarnation=f"{name}-life", lease_ms=100)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        """On the stream of block events."""
        self.num_calls = 0
        self.address = ""
        self._answers_on_stream = answers_on_stream

    async def BlockEvents(
        self, requests: AsyncIterator[kv.BlockEventsRequest], context: Any
    ) -> AsyncIterator[kv.BlockEventBatch]:
        if not self._answers_on_stream:
            yield kv.BlockEventBatch(is_snapshot=True)
            await asyncio.Event().wait()
        async with aclosing(event_stream(HostPoints(), lambda max_rows: self.tables, self._asked(requests))) as batches:
            async for batch in batches:
                yield batch

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        self.num_calls += 1
        await self.may_answer.wait()
        return self.tables

    def register(self, registry: WorkerRegistry) -> None:
        registry.register(kv_service(self.name, self.address, host_id=f"host-of-{self.name}"), kv_load())

    async def _asked(self, requests: AsyncIterator[kv.BlockEventsRequest]) -> AsyncIterator[kv.BlockEventsRequest]:
        async for request in requests:
            if request.HasField("tables"):
                self.num_asked += 1
                await self.may_answer.wait()
            yield request


@asynccontextmanager
async def scripted_service(
    registry: WorkerRegistry, name: str = "kv-0", *, answers_on_stream: bool = True
) -> AsyncIterator[ScriptedService]:
    service = ScriptedService(name, answers_on_stream=answers_on_stream)  # type: ignore[abstract]  # nothing else
    server = GrpcServer(
        "127.0.0.1:0", lambda server: kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, server), []
    )
    service.address = await server.start()
    service.register(registry)
    try:
        yield service
    finally:
        await server.stop(0)


class Streams:
    """A gateway's streams to the services of a registry."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self.links = LinkPool(registry, "gateway", "life")
        self.block_events = BlockEventReader(SamplePointIndex(), registry, "life")
        for worker in registry.workers():
            self.links._changed(worker, True)
            self.block_events._changed(worker, True)

    async def until_open(self, *names: str) -> None:
        for name in names:
            await until(partial(self._is_open, name))

    def _is_open(self, name: str) -> bool:
        worker = self._registry.get(name)
        assert worker is not None, "registered"
        streams: QuestionStreams = self.block_events if worker.role == pb.WORKER_ROLE_KV else self.links
        questions = streams.questions(worker)
        return questions is not None and questions.is_open

    async def close(self) -> None:
        await self.block_events.close()
        await self.links.close()


@asynccontextmanager
async def streaming(
    registry: WorkerRegistry, answer_seconds: float = 10.0
) -> AsyncIterator[tuple[Streams, TableReader]]:
    streams = Streams(registry)
    reader = TableReader(streams.links, streams.block_events, answer_seconds)
    try:
        yield streams, reader
    finally:
        await reader.close()
        await streams.close()


@asynccontextmanager
async def auditing(registry: WorkerRegistry, *open_to: str, **changes: Any) -> AsyncIterator[Auditor]:
    """Yield an auditor whose streams to the services `open_to` (default: kv-0) are open."""
    async with streaming(registry, answer_seconds=0.3) as (streams, reader):
        await streams.until_open(*open_to or ("kv-0",))
        yield Auditor(registry, streams.links, "gateway", reader, **{"grace_seconds": 0.1, **changes})
