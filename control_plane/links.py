"""How does this gateway talk to a worker? One Attach stream per worker incarnation, shared by all its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from control_plane.registry import Worker, WorkerRegistry
from runtime.channel import call_error, open_channel
from runtime.errors import TandemError, Unavailable, from_proto
from runtime.log import get_logger
from tandem.v1 import decode_pb2_grpc, prefill_pb2_grpc
from tandem.v1 import types_pb2 as pb

log = get_logger(__name__)

_RECONNECT_SECONDS = 0.2


class Sink(Protocol):
    """Receives one request's events, on the event loop, in order; nothing comes after `ended`."""

    def accepted(self) -> None: ...

    def output(self, output: pb.TokenOutput) -> None: ...

    def ended(self, error: TandemError, *, is_refusal: bool) -> None:
        """The worker refused the request, failed it, or is gone."""


class WorkerLink:
    """The stream to one incarnation of a worker; opened again if it breaks while the worker is still registered."""

    def __init__(self, worker: Worker, gateway_id: str, gateway_incarnation: str) -> None:
        self.worker = worker
        self._hello = pb.AttachHello(
            gateway_id=gateway_id, gateway_incarnation=gateway_incarnation, worker_incarnation=worker.incarnation
        )
        self._sinks: dict[tuple[str, int], Sink] = {}
        self._commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self._is_attached = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, submit: pb.Submit, sink: Sink) -> None:
        """Send a request; every event that follows goes to `sink`."""
        self._sinks[submit.request_id, submit.attempt] = sink
        self._commands.put_nowait(pb.Command(submit=submit))

    def cancel(self, request_id: str, attempt: int) -> None:
        """Cancel a request and hear nothing more of it; unknown ids are ignored."""
        if self._sinks.pop((request_id, attempt), None) is not None:
            self._commands.put_nowait(pb.Command(cancel=pb.Cancel(request_id=request_id, attempt=attempt)))

    def forget(self, request_id: str, attempt: int) -> None:
        """Hear nothing more of a request that has finished."""
        self._sinks.pop((request_id, attempt), None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason: TandemError = Unavailable(f"worker {self.worker.worker_id} is gone")
        try:
            while True:
                try:
                    await self._attach()
                    reason = Unavailable(f"worker {self.worker.worker_id} closed its stream")
                except grpc.aio.AioRpcError as error:
                    reason = call_error(error)
                except TandemError as error:
                    reason = error
                log.info("attach_ended", worker=self.worker.worker_id, error=reason.message)
                self._fail_all(Unavailable(f"the stream to worker {self.worker.worker_id} broke: {reason.message}"))
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            self._fail_all(Unavailable(f"worker {self.worker.worker_id} is gone"))

    async def _attach(self) -> None:
        async with open_channel(self.worker.info.address) as channel:
            is_prefill = self.worker.role == pb.WORKER_ROLE_PREFILL
            stub = (prefill_pb2_grpc.PrefillServiceStub if is_prefill else decode_pb2_grpc.DecodeServiceStub)(channel)
            async for event in stub.Attach(self._outgoing()):
                self._handle(event)

    async def _outgoing(self) -> AsyncIterator[pb.Command]:
        yield pb.Command(hello=self._hello)
        while True:
            yield await self._commands.get()

    def _handle(self, event: pb.Event) -> None:
        match event.WhichOneof("kind"):
            case "step":
                for output in event.step.outputs:
                    if sink := self._sinks.get((output.request_id, output.attempt)):
                        sink.output(output)
            case "accepted":
                if sink := self._sinks.get((event.accepted.request_id, event.accepted.attempt)):
                    sink.accepted()
            case "refused":
                self._end(event.refused.request_id, event.refused.attempt, event.refused.error, is_refusal=True)
            case "failed":
                self._end(event.failed.request_id, event.failed.attempt, event.failed.error, is_refusal=False)
            case "hello":
                log.info("attached", worker=self.worker.worker_id, incarnation=event.hello.worker_incarnation)

    def _end(self, request_id: str, attempt: int, detail: pb.ErrorDetail, *, is_refusal: bool) -> None:
        if sink := self._sinks.pop((request_id, attempt), None):
            sink.ended(from_proto(detail), is_refusal=is_refusal)

    def _fail_all(self, error: TandemError) -> None:
        """Tell every request that the worker is lost, and drop what was not sent: none of it may go to a new stream."""
        sinks, self._sinks = self._sinks, {}
        self._commands = asyncio.Queue()
        for sink in sinks.values():
            sink.ended(error, is_refusal=False)


class LinkPool:
    """A link to every prefill and decode worker that is registered."""

    def __init__(self, registry: WorkerRegistry, gateway_id: str, gateway_incarnation: str) -> None:
        self._gateway_id = gateway_id
        self._gateway_incarnation = gateway_incarnation
        self._links: dict[str, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        registry.listen(self._changed)

    def get(self, worker: Worker) -> WorkerLink:
        """Return the link to that incarnation; raises Unavailable if the worker has gone meanwhile."""
        link = self._links.get(worker.incarnation)
        if link is None:
            raise Unavailable(f"worker {worker.worker_id} is gone", retry_after_seconds=1.0)
        return link

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role == pb.WORKER_ROLE_KV:
            return
        if is_here and worker.incarnation not in self._links:
            self._links[worker.incarnation] = WorkerLink(worker, self._gateway_id, self._gateway_incarnation)
        elif not is_here and (link := self._links.pop(worker.incarnation, None)):
            task = asyncio.create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
