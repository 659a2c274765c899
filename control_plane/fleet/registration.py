"""Serves the registry over gRPC: workers register, send heartbeats and deregister."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest

HEARTBEAT_INTERVAL_MS = 1000


class ControlPlaneService(control_plane_pb2_grpc.ControlPlaneServiceServicer):
    """tandem.v1.ControlPlaneService."""

    def __init__(self, registry: WorkerRegistry, handle_key: bytes, replicas: Sequence[str]) -> None:
        self._registry = registry
        self._handle_key = handle_key
        self._replicas = list(replicas)

    async def Register(self, request: cp.RegisterRequest, context: Any) -> cp.RegisterReply:
        info = request.info
        for name in ("worker_id", "incarnation", "address", "host_id"):
            if not getattr(info, name):
                raise InvalidRequest(f"info.{name} is empty; fill it in", field=f"info.{name}")
        if info.role == pb.WORKER_ROLE_UNSPECIFIED:
            raise InvalidRequest("info.role is unspecified; set prefill, decode or kv", field="info.role")
        self._registry.register(info, request.load, request.info_version)
        return cp.RegisterReply(
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            replicas=self._replicas,
            handle_key=self._handle_key,
            kv_services=self._registry.kv_services(info.host_id),
        )

    async def Heartbeat(self, request: cp.HeartbeatRequest, context: Any) -> cp.HeartbeatReply:
        is_known = self._registry.heartbeat(request)
        worker = self._registry.get(request.worker_id)
        kv_services = self._registry.kv_services(worker.info.host_id) if worker else []
        return cp.HeartbeatReply(known=is_known, replicas=self._replicas, kv_services=kv_services)

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
