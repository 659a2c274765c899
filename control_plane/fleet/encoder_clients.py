"""Connects this gateway to its encode workers: one channel per incarnation, shared by all requests."""

from __future__ import annotations

import asyncio

import grpc

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

    def __init__(self, registry: WorkerRegistry, member: FleetMember | None = None) -> None:
        self._member = member
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing = TaskSet()
        registry.listen(self._changed)

    def stub(self, worker: Worker) -> worker_pb2_grpc.EncodeServiceAsyncStub:
        channel = self._channels.get(worker.incarnation)
        if channel is None:
            channel = self._channels[worker.incarnation] = open_worker_channel(worker.info, self._member)
        return worker_pb2_grpc.EncodeServiceStub(channel)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels), self._closing.cancel(), return_exceptions=True)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Close the channel of a worker that is gone; a listener of the registry."""
        if is_here:
            return
        if channel := self._channels.pop(worker.incarnation, None):
            is_draining = worker.load.state == pb.WORKER_STATE_DRAINING
            self._closing.spawn(channel.close(_GRACE_SECONDS if is_draining else None))
