"""Connects this gateway to its encode workers: one channel per incarnation, shared by all requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from control_plane.fleet.encoder_link import EncoderLink
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.tasks import TaskSet

_GRACE_SECONDS = 30.0
"""For the calls of a worker that drains."""


class EncoderClients:
    """Opens a channel to an encode worker at its first call, and closes it when the worker is gone."""

    def __init__(
        self,
        registry: WorkerRegistry,
        member: FleetMember | None = None,
        gateway_id: str = "",
        gateway_incarnation: str = "",
    ) -> None:
        self._member = member
        self._hello = pb.AttachHello(gateway_id=gateway_id, gateway_incarnation=gateway_incarnation)
        self._links: dict[str, EncoderLink] = {}
        self._closing = TaskSet()
        self._on_attached: Callable[[Worker], None] = lambda worker: None
        self._on_grant: Callable[[Worker, pb.Grant], None] = lambda worker, grant: None
        registry.listen(self._changed)

    def listen(self, on_attached: Callable[[Worker], None], on_grant: Callable[[Worker, pb.Grant], None]) -> None:
        """Call `on_attached` when a worker's stream of grants has begun or ended, `on_grant` with each grant."""
        self._on_attached, self._on_grant = on_attached, on_grant

    def stub(self, worker: Worker) -> worker_pb2_grpc.EncodeServiceAsyncStub:
        """Return a stub for calls that count under no grant."""
        return self._link(worker).stub

    async def encode(
        self, worker: Worker, request: pb.EncodeRequest, num_tokens: int, timeout: float
    ) -> pb.EncodeReply:
        """Send a call, and return the reply. Raise TandemError."""
        return await self._link(worker).encode(request, num_tokens, timeout)

    def has_room(self, worker: Worker, num_tokens: int, num_calls: int = 1) -> bool | None:
        """Return whether calls are within the worker's grant; None: there is none, and the caller decides."""
        link = self._links.get(worker.incarnation)
        return link.has_room(num_tokens, num_calls) if link is not None else None

    def uses_grants(self, worker: Worker) -> bool:
        """Return whether the worker sends grants on a stream that is open."""
        link = self._links.get(worker.incarnation)
        return link is not None and link.uses_grants

    def report_waiting(self, incarnation: str, waiting: pb.WaitingRequests) -> bool:
        """Tell a worker what waits; return False, and send nothing, if it does not grant, or was never called."""
        link = self._links.get(incarnation)
        if link is None or not link.uses_grants:
            return False
        link.report_waiting(waiting)
        return True

    def num_granted(self) -> Counter[tuple[str, str]]:
        """Return how many calls may be sent by the grants of workers, by model and role; called in any thread."""
        granted: Counter[tuple[str, str]] = Counter()
        for link in list(self._links.values()):
            left, model_id = link.attachment.left(), link.worker.info.card.model_id
            if left is not None:
                granted[model_id, "encode"] += left.num_requests
        return granted

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), self._closing.cancel(), return_exceptions=True)

    def _link(self, worker: Worker) -> EncoderLink:
        link = self._links.get(worker.incarnation)
        if link is None:
            channel = open_worker_channel(worker.info, self._member)
            link = EncoderLink(worker, channel, self._hello, self._on_attached, self._on_grant)
            self._links[worker.incarnation] = link
        return link

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Close the channel of a worker that is gone; a listener of the registry."""
        if is_here:
            return
        if link := self._links.pop(worker.incarnation, None):
            is_draining = worker.load.state == pb.WORKER_STATE_DRAINING
            self._closing.spawn(link.close(_GRACE_SECONDS if is_draining else None))
