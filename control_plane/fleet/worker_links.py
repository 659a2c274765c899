"""How does this gateway talk to a worker? One Attach stream per worker incarnation, shared by all its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import decode_pb2_grpc, prefill_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InternalError, TandemError, Unavailable, from_proto
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_RECONNECT_SECONDS = 0.2


class Sink(Protocol):
    """Receives one request's events, on the event loop, in order; nothing comes after `ended`."""

    def accepted(self) -> None: ...

    def output(self, output: pb.TokenOutput) -> None: ...

    def ended(self, error: TandemError) -> None:
        """The worker refused the request, failed it, or is gone."""


class WorkerLink:
    """The stream to one incarnation of a worker; opened again if it breaks while the worker is still registered."""

    def __init__(self, worker: Worker, gateway_id: str, gateway_incarnation: str) -> None:
        self.worker = worker
        self._hello = pb.AttachHello(
            gateway_id=gateway_id, gateway_incarnation=gateway_incarnation, worker_incarnation=worker.incarnation
        )
        self._sinks: dict[tuple[str, int], Sink] = {}
        self._commands: asyncio.Queue[pb.Command | None] = asyncio.Queue()
        self._is_retiring = False
        self._task = asyncio.create_task(self._run())

    @property
    def num_requests(self) -> int:
        """How many requests hear of this worker."""
        return len(self._sinks)

    def requests(self) -> list[tuple[str, int]]:
        """Return id and attempt of every request that hears of this worker."""
        return list(self._sinks)

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

    async def retire(self) -> None:
        """The worker has said goodbye: read what it still sends, until it ends the stream."""
        self._is_retiring = True
        try:
            if self._sinks:
                await asyncio.wait([self._task])
        finally:
            await self.close()

    async def close(self) -> None:
        """Hang up; every request left is told that the worker is gone."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while not self._is_retiring:
                reason = await self._attach_until_it_ends()
                log.info("attach_ended", worker=self.worker.worker_id, reason=reason)
                self._fail_all(Unavailable(f"the stream to worker {self.worker.worker_id} broke: {reason}"))
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            self._fail_all(Unavailable(f"worker {self.worker.worker_id} is gone"))

    async def _attach_until_it_ends(self) -> str:
        """Return why the stream ended; a bug on our side costs this stream, never the ones that follow."""
        try:
            await self._attach()
        except TandemError as error:
            return error.message
        except Exception as error:
            log.exception("attach_broke", worker=self.worker.worker_id)
            return repr(error)
        return "the worker closed it"

    async def _attach(self) -> None:
        async with open_channel(self.worker.info.address) as channel:
            is_prefill = self.worker.role == pb.WORKER_ROLE_PREFILL
            stub = (prefill_pb2_grpc.PrefillServiceStub if is_prefill else decode_pb2_grpc.DecodeServiceStub)(channel)
            async for event in stub.Attach(self._outgoing(self._commands)):
                self._handle(event)

    async def _outgoing(self, commands: asyncio.Queue[pb.Command | None]) -> AsyncIterator[pb.Command]:
        """Yield the commands of one stream; each has a queue of its own, so that a dead one takes none of the next."""
        yield pb.Command(hello=self._hello)
        while (command := await commands.get()) is not None:
            yield command

    def _handle(self, event: pb.Event) -> None:
        match event.WhichOneof("kind"):
            case "step":
                for output in event.step.outputs:
                    self._output(output)
            case "accepted":
                if sink := self._sinks.get((event.accepted.request_id, event.accepted.attempt)):
                    sink.accepted()
            case "refused":
                self._end(event.refused.request_id, event.refused.attempt, event.refused.error)
            case "failed":
                self._end(event.failed.request_id, event.failed.attempt, event.failed.error)
            case "hello":
                log.info("attached", worker=self.worker.worker_id, incarnation=event.hello.worker_incarnation)

    def _output(self, output: pb.TokenOutput) -> None:
        """Pass an output on; one that its request cannot take costs that request, not the stream of all the others."""
        sink = self._sinks.get((output.request_id, output.attempt))
        if sink is None:
            return
        try:
            sink.output(output)
        except Exception as error:
            if not isinstance(error, TandemError):
                log.exception("output_not_taken", request_id=output.request_id)
                error = InternalError(f"an output of worker {self.worker.worker_id} could not be taken: {error!r}")
            self.cancel(output.request_id, output.attempt)
            sink.ended(error)

    def _end(self, request_id: str, attempt: int, detail: pb.ErrorDetail) -> None:
        if sink := self._sinks.pop((request_id, attempt), None):
            sink.ended(from_proto(detail))

    def _fail_all(self, error: TandemError) -> None:
        """Tell every request that the worker is lost, and drop what was not sent: none of it may go to a new stream."""
        sinks, self._sinks = self._sinks, {}
        self._commands.put_nowait(None)
        self._commands = asyncio.Queue()
        for sink in sinks.values():
            sink.ended(error)


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

    def running(self) -> set[tuple[str, str, int]]:
        """Return the worker's incarnation, id and attempt of every request that this gateway has running."""
        links = self._links.items()
        return {(incarnation, *request) for incarnation, link in links for request in link.requests()}

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(link.close() for link in links), *self._closing, return_exceptions=True)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role == pb.WORKER_ROLE_KV:
            return
        if is_here and worker.incarnation not in self._links:
            self._links[worker.incarnation] = WorkerLink(worker, self._gateway_id, self._gateway_incarnation)
        elif not is_here and (link := self._links.pop(worker.incarnation, None)):
            is_goodbye = worker.load.state == pb.WORKER_STATE_DRAINING
            task = asyncio.create_task(link.retire() if is_goodbye else link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
