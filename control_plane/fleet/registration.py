"""Serves the registry over gRPC: workers register, send heartbeats and deregister."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from control_plane.fleet.registration_bounds import check_info, check_load, check_name
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_addresses import WorkerAddresses
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.access import is_in_plaintext
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.log import get_logger
from tandem_runtime.shared_port import true_peer

log = get_logger(__name__)

HEARTBEAT_INTERVAL_MS = 1000


class FleetNews(Protocol):
    """What members hear of the fleet's identity with each reply."""

    @property
    def bundle_number(self) -> int:
        """The number of the trust bundle: a member with an older one renews its certificate."""

    def denied_since(self, number: int) -> cp.DenyList:
        """Return what a process lacks of the deny list that has read up to `number`."""


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

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        info = request.info
        check_info(info)
        check_load(request.load, is_first=True)
        peer = true_peer(context.peer())
        await self._addresses.check(info.address, peer)
        await self._check_metrics_address(info, peer)
        self._registry.register(info, request.load, request.info_version)
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

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        check_load(request.load)
        check_name(request.kv_address, "kv_address")
        is_known = self._registry.heartbeat(request)
        worker = self._registry.get(request.worker_id)
        kv_services = self._registry.kv_services(worker.info.host_id) if worker else []
        reply = cp.HeartbeatReply(known=is_known, replicas=self._replicas, kv_services=kv_services)
        self._add_news(reply, request.deny_list_number)
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
