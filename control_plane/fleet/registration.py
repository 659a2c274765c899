"""Serves the registry over gRPC: workers register, send heartbeats and deregister."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from control_plane.fleet.registration_bounds import check_info, check_load, check_name
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_addresses import WorkerAddresses
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.access import is_in_plaintext
from tandem_runtime.errors import InvalidRequest, Unavailable
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.log import get_logger
from tandem_runtime.shared_port import true_peer
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

HEARTBEAT_INTERVAL_MS = 1000
_MAX_ASKED = 16
"""Each takes some 50 us, and what its stream takes to write."""
SELDOM_MS = 30_000
"""Between heartbeats of a worker whose host passes them on: they show that its stream works, and bring news."""


class FleetNews(Protocol):
    """What members hear of the fleet's identity with each reply."""

    @property
    def bundle_number(self) -> int:
        """The number of the trust bundle: a member with an older one renews its certificate."""

    def denied_since(self, number: int) -> cp.DenyList:
        """Return what a process lacks of the deny list that has read up to `number`."""


def take_relayed(registry: WorkerRegistry, beat: cp.HeartbeatRequest, host_id: str) -> None:
    """Take in a heartbeat that a host's KV service has passed on; raises InvalidRequest for one beyond its bounds.

    One of a worker that is not registered on this host is ignored: it may be of a moment ago.
    """
    check_load(beat.load)
    check_name(beat.kv_address, "kv_address")
    if not registry.relayed(beat, host_id):
        log.debug("heartbeat_of_nobody", worker=beat.worker_id[:64], host=host_id)


class _Stream:
    """A stream of heartbeats of one member."""

    def __init__(self, task: asyncio.Task[Any], context: Any) -> None:
        self.task = task
        self.worker_id = self.host_id = ""
        self.is_slow = False
        """Whether the member sends few heartbeats."""
        self.told: tuple[int | str, ...] = ()
        """What the member has heard of: numbers of the trust bundle and deny list, KV services of its host."""
        self.deny_list_number = 0
        """As the member stated it last."""
        self._context = context
        self._writing = asyncio.Lock()

    def heard(self, request: cp.HeartbeatRequest, reply: cp.HeartbeatReply, host_id: str) -> None:
        """Note a heartbeat and its reply."""
        self.worker_id, self.host_id, self.deny_list_number = request.worker_id, host_id, request.deny_list_number
        kv_services = [service.incarnation for service in reply.kv_services]
        self.is_slow, self.told = reply.next_ms > 0, (reply.bundle_number, reply.deny_list.number, *kv_services)

    async def write(self, reply: cp.HeartbeatReply) -> None:
        async with self._writing:  # a reply, and a question of the sweep
            await self._context.write(reply)

    async def ask(self, reply: cp.HeartbeatReply) -> None:
        """Write a reply that nobody waits for."""
        try:
            await self.write(reply)
        except Exception as error:  # noqa: BLE001 - gRPC's own, of several kinds: the call has ended, and its handler too
            log.debug("heartbeat_not_asked", worker=self.worker_id, error=repr(error))


class ControlPlaneService(control_plane_pb2_grpc.ControlPlaneServiceServicer):
    """tandem.v1.ControlPlaneService."""

    def __init__(
        self,
        registry: WorkerRegistry,
        keys: KvKeys,
        replicas: Sequence[str],
        *,
        macs_until: float = 0.0,
        addresses: WorkerAddresses | None = None,
        news: FleetNews | None = None,
    ) -> None:
        """Without `news`, replies say nothing of certificates.

        Until `macs_until` (seconds since the epoch), KV services get the key for the MACs of release 0.2.
        """
        self._registry = registry
        self._keys = keys
        self._macs_until = macs_until
        self._addresses = addresses or WorkerAddresses()
        self._replicas = list(replicas)
        self._news = news
        self._streams: set[_Stream] = set()
        self._asking = TaskSet()
        self._denied_number = 0
        self._is_closed = False

    def close(self) -> None:
        """End the streams of heartbeats: their senders call other replicas, or this one when it is back."""
        self._is_closed = True
        for stream in self._streams:
            stream.task.cancel()

    def ask(self) -> bool:
        """Ask those for a heartbeat that send few, and whose host tells nothing of them or who lack news; at most 16.

        Called some times a second. Return whether the next call should follow in the next turn of the event loop.
        """
        news = (0, 0)
        if self._news is not None:
            self._denied_number = self._news.denied_since(self._denied_number).number
            news = self._news.bundle_number, self._denied_number
        num_asked, get, silent_at = 0, self._registry.get, self._registry.silent_at()
        to_tell: dict[str, tuple[int | str, ...]] = {}  # at each host
        for stream in self._streams:
            if not stream.is_slow or (worker := get(stream.worker_id)) is None:
                continue
            if (now_true := to_tell.get(stream.host_id)) is None:
                now_true = to_tell[stream.host_id] = (*news, *self._registry.kv_incarnations(stream.host_id))
            if worker.relayed_at <= silent_at or stream.told != now_true:
                if num_asked == _MAX_ASKED:
                    return True
                num_asked += 1
                stream.is_slow = False  # until the reply to the heartbeat that comes now
                self._asking.spawn(stream.ask(self._reply(worker, stream.deny_list_number)))
        return False

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        info = request.info
        check_info(info)
        check_load(request.load, is_first=True)
        peer = true_peer(context.peer())
        await self._addresses.check(info.address, peer)
        await self._check_metrics_address(info, peer)
        self._registry.register(info, request.load, request.info_version, request.number)
        reply = cp.RegisterReply(
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            replicas=self._replicas,
            kv_services=self._registry.kv_services(info.host_id),
            handle_public_keys=self._keys.public_keys,
        )
        if info.role == pb.WORKER_ROLE_KV:  # nobody else verifies a MAC, and who can verify one can make one
            if not is_in_plaintext():  # release 0.2 uses the other key only
                reply.link_key = self._keys.link_key
            if time.time() < self._macs_until:
                reply.handle_key = self._keys.mac_key
        self._add_news(reply, request.deny_list_number)
        return reply

    async def _check_metrics_address(self, info: pb.WorkerInfo, peer: str) -> None:
        """Forget an address of metrics that the caller may not register: Prometheus is sent there. The worker stays."""
        try:
            if info.metrics_address:
                await self._addresses.check(info.metrics_address, peer, "info.metrics_address")
        except InvalidRequest as error:
            log.warning("metrics_address_ignored", worker=info.worker_id, reason=error.message)
            info.metrics_address = ""

    async def Heartbeats(  # type: ignore[override]  # writes by itself: also what nobody has asked for
        self, requests: AsyncIterator[cp.HeartbeatRequest], context: Any
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        stream = _Stream(task, context)
        self._streams.add(stream)
        try:
            async for request in requests:
                reply = self._heard(request)
                worker = self._registry.get(request.worker_id)
                if reply.known and worker is not None and self._registry.is_relayed(worker):
                    reply.next_ms = SELDOM_MS
                stream.heard(request, reply, worker.info.host_id if worker is not None else "")
                await stream.write(reply)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise Unavailable("this control plane stops") from None
        finally:
            self._streams.discard(stream)

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        return self._heard(request)

    def _heard(self, request: cp.HeartbeatRequest) -> cp.HeartbeatReply:
        check_load(request.load)
        check_name(request.kv_address, "kv_address")
        is_known = self._registry.heartbeat(request)
        reply = self._reply(self._registry.get(request.worker_id), request.deny_list_number)
        reply.known = is_known
        return reply

    def _reply(self, worker: Worker | None, deny_list_number: int) -> cp.HeartbeatReply:
        kv_services = self._registry.kv_services(worker.info.host_id) if worker is not None else []
        reply = cp.HeartbeatReply(known=worker is not None, replicas=self._replicas, kv_services=kv_services)
        self._add_news(reply, deny_list_number)
        return reply

    async def Deregister(self, request: cp.DeregisterRequest, context: Any) -> cp.DeregisterReply:
        self._registry.deregister(request.worker_id, request.incarnation)
        return cp.DeregisterReply()

    async def ListWorkers(self, request: cp.ListWorkersRequest, context: Any) -> cp.ListWorkersReply:
        now_ms, now = int(time.time() * 1000), time.monotonic()
        return cp.ListWorkersReply(
            workers=[
                cp.WorkerStatus(
                    info=worker.info,
                    load=worker.load,
                    last_heartbeat_unix_ms=now_ms - int((now - worker.last_heartbeat) * 1000),
                    suspected=worker.is_suspected,
                )
                for worker in self._registry.workers()
            ]
        )

    def _add_news(self, reply: cp.RegisterReply | cp.HeartbeatReply, deny_list_number: int) -> None:
        if self._news is not None:
            reply.bundle_number = self._news.bundle_number
            reply.deny_list.CopyFrom(self._news.denied_since(deny_list_number))
