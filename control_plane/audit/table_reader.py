"""Reads the tables of all services at the same time; it begins with one service in each turn of the event loop.

The questions go over streams that are open anyway: `Attach` of workers, `BlockEvents` of KV services. Only a service of
a release that answers no questions there is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import grpc

from control_plane.audit.snapshot import AuditedService
from control_plane.fleet.registry import Worker
from tandem.v1 import kv_transfer_pb2_grpc, worker_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import StaleIncarnation, TandemError, Unavailable, Unsupported
from tandem_runtime.kv.table_parts import TableQuestions
from tandem_runtime.tasks import Turns

ANSWER_SECONDS = 2.0
MAX_ROWS = 4096
"""Maximum rows of each table; more rows are only counted. A healthy service never has as many."""

_Stub: TypeAlias = "kv_transfer_pb2_grpc.KvTransferServiceAsyncStub | worker_pb2_grpc.WorkerServiceAsyncStub"


class QuestionStreams(Protocol):
    """The streams to the services of some roles."""

    def questions(self, worker: Worker) -> TableQuestions | None:
        """Return what asks a service for its tables; None: there is no stream to it."""


class TableReader:
    """Reads tables. It keeps a channel to each service that must be called, between audits."""

    def __init__(
        self,
        links: QuestionStreams,
        block_events: QuestionStreams,
        answer_seconds: float = ANSWER_SECONDS,
        member: FleetMember | None = None,
    ) -> None:
        """`links`: the streams to workers; `block_events`: those to KV services."""
        self._links = links
        self._block_events = block_events
        self._answer_seconds = answer_seconds
        self._member = member
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns = Turns()

    async def read(self, workers: Sequence[Worker]) -> tuple[list[AuditedService], dict[str, str]]:
        """Return the tables of services that answer in time, and the errors of the others by incarnation."""
        workers = [worker for worker in workers if worker.role != pb.WORKER_ROLE_ENCODE]  # which keep no table
        await self._close_all_but({worker.incarnation for worker in workers})
        async with asyncio.TaskGroup() as group:
            asking = []
            for worker in workers:
                await self._turns.next()  # a channel and its first call take half a millisecond; a fleet has hundreds
                asking.append(group.create_task(self._tables(worker)))
        replies = [task.result() for task in asking]
        answered = [
            AuditedService(worker, reply)
            for worker, reply in zip(workers, replies, strict=True)
            if isinstance(reply, TablesReply)
        ]
        silent = {
            worker.incarnation: reply for worker, reply in zip(workers, replies, strict=True) if isinstance(reply, str)
        }
        return answered, silent

    async def close(self) -> None:
        await self._close_all_but(set())

    async def _tables(self, worker: Worker) -> TablesReply | str:
        try:
            reply = await self._asked(worker)
            if reply.incarnation != worker.incarnation:
                raise StaleIncarnation(f"incarnation {reply.incarnation} now answers at this address")
        except TandemError as error:
            return error.message
        return reply

    async def _asked(self, worker: Worker) -> TablesReply:
        streams = self._block_events if worker.role == pb.WORKER_ROLE_KV else self._links
        questions = streams.questions(worker)
        if questions is None:
            raise Unavailable(f"no stream leads to {worker.worker_id}: it is gone, or another has taken its place")
        try:
            return await questions.ask(MAX_ROWS, self._answer_seconds)
        except Unsupported:
            return await self._called(worker)

    async def _called(self, worker: Worker) -> TablesReply:
        channel = self._channels.get(worker.incarnation)
        if channel is None:
            channel = self._channels[worker.incarnation] = open_worker_channel(worker.info, self._member)
        request = TablesRequest(max_rows=MAX_ROWS)
        reply: TablesReply = await _stub(worker, channel).Tables(request, timeout=self._answer_seconds)
        return reply

    async def _close_all_but(self, wanted: set[str]) -> None:
        for incarnation in self._channels.keys() - wanted:
            await self._turns.next()
            await self._channels.pop(incarnation).close()


def _stub(worker: Worker, channel: grpc.aio.Channel) -> _Stub:
    if worker.role == pb.WORKER_ROLE_KV:
        return kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
    return worker_pb2_grpc.WorkerServiceStub(channel)
