"""The process of an encode worker."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from encode_svc.front import EncodeFront
from encode_svc.metrics import export_metrics
from encode_svc.service import EncodeService
from encode_svc.settings import EncodeSettings
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.certificates.membership import FleetMember
from tandem_worker.engine_link import EngineLink
from tandem_worker.model_card import AssetStore
from tandem_worker.worker_process import WorkerProcess


class EncodeWorker(WorkerProcess):
    """One run of an encode worker."""

    def __init__(self, settings: EncodeSettings) -> None:
        super().__init__(settings, pb.WORKER_ROLE_ENCODE)
        self._encode_settings = settings

    def make_front(self, engine: EngineLink, member: FleetMember | None) -> EncodeFront:
        settings = self._encode_settings
        self._front = EncodeFront(
            engine,
            settings.engine_timeout_seconds,
            max_calls=settings.max_num_waiting,
            step_tokens=settings.num_step_tokens,
        )
        export_metrics(lambda: self._front.stats, lambda: self._front.state.memory)
        return self._front

    @property
    def service_name(self) -> str:
        return "tandem.v1.EncodeService"

    def add_service(self, server: grpc.aio.Server, assets: AssetStore, info: Callable[[], pb.WorkerInfo]) -> None:
        worker_pb2_grpc.add_EncodeServiceServicer_to_server(
            EncodeService(self._front, self.incarnation, assets, info), server
        )
