"""The process of a prefill or decode worker: a worker whose front exchanges KV blocks."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.registration import Registrar
from tandem_worker import device_metrics, stats
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.front import WorkerFront
from tandem_worker.grant_sender import GrantSender
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_link import KvLink
from tandem_worker.kv_offload import KVOffload
from tandem_worker.model_card import AssetStore
from tandem_worker.requests import RequestTable
from tandem_worker.service import WorkerService
from tandem_worker.settings import WorkerSettings
from tandem_worker.worker_process import WorkerProcess
from tandem_worker.worker_room import PoolRoom, PromptRoom, WorkerRoom

MakeConnector = Callable[[EngineLink, KvLink, EngineRegions, RequestTable, WorkerSettings], KVConnector]


def main(settings: WorkerSettings, role: pb.WorkerRole.ValueType, make_connector: MakeConnector) -> int:
    """Run a worker until a signal drains it or its engine dies; return the exit code."""
    return _KvWorker(settings, role, make_connector).run()


class _KvWorker(WorkerProcess):
    def __init__(self, settings: WorkerSettings, role: pb.WorkerRole.ValueType, make_connector: MakeConnector) -> None:
        super().__init__(settings, role)
        self._own_settings = settings
        self._make_connector = make_connector

    def make_front(self, engine: EngineLink, member: FleetMember | None) -> WorkerFront:
        settings = self._own_settings
        self._link = link = KvLink(self.incarnation, settings.lease_seconds, member)
        regions, requests = EngineRegions(engine, link), RequestTable()
        connector = self._make_connector(engine, link, regions, requests, settings)
        offload = KVOffload(engine, link, regions, self.incarnation, is_enabled=settings.prompt_cache)
        self._front = WorkerFront(
            self.incarnation,
            engine,
            requests,
            connector,
            offload,
            settings.engine_timeout_seconds,
            settings.resolved_exactness,
            GrantSender(granted_room(settings, self._role)),
        )
        stats.export_metrics(lambda: self._front.stats, lambda: self._front.bytes_per_block)
        device_metrics.export(lambda: self._front.state.memory, lambda: stats.tokens_by_phase(self._front.stats))
        return self._front

    @property
    def service_name(self) -> str:
        return "tandem.v1.WorkerService"

    def add_service(self, server: grpc.aio.Server, assets: AssetStore, info: Callable[[], pb.WorkerInfo]) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(self._front, assets, info), server)

    def registers(self, registrar: Registrar, info: Callable[[], pb.WorkerInfo]) -> None:
        self._link.follow(registrar.kv_service, on_change=lambda: registrar.update_info(info()))
        self._front.relay(registrar.heartbeat_request, registrar.beat_now)

    async def close(self) -> None:
        await self._link.close()


def granted_room(settings: WorkerSettings, role: pb.WorkerRole.ValueType) -> WorkerRoom | None:
    """Return the room that the worker grants; None: it grants nothing."""
    if role != pb.WORKER_ROLE_PREFILL:
        return PoolRoom(settings.max_num_seqs)
    if not settings.prompt_grants:
        return None
    return PromptRoom(settings.max_num_seqs, settings.max_num_waiting, settings.max_num_batched_tokens)
