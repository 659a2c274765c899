"""The life of a worker process: load, register, serve, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.client import EngineClient
from tandem_runtime import identity, log, metrics, paths, tracing
from tandem_runtime.certificates.membership import WORKER_ROLES, FleetMember
from tandem_runtime.enrolment.membership import StoppedEarly, member_of_fleet
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.lifecycle import run
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer
from tandem_runtime.settings import describe
from tandem_worker import stats
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.front import WorkerFront
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_link import KvLink
from tandem_worker.kv_offload import KVOffload
from tandem_worker.model_card import AssetStore
from tandem_worker.requests import RequestTable
from tandem_worker.service import WorkerService
from tandem_worker.settings import WorkerSettings

logger = log.get_logger(__name__)

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: a restart would fail for the same reason."""

_END_STREAMS_SECONDS = 1.0

_SERVICE_NAME = "tandem.v1.WorkerService"

MakeConnector = Callable[[EngineLink, KvLink, EngineRegions, RequestTable, WorkerSettings], KVConnector]


def main(settings: WorkerSettings, role: pb.WorkerRole.ValueType, make_connector: MakeConnector) -> int:
    """Run a worker until a signal drains it or its engine dies; return the exit code."""
    name = "prefill" if role == pb.WORKER_ROLE_PREFILL else "decode"
    worker = _Worker(settings, role, name, make_connector)
    log.configure(f"tandem-{name}", settings.log_json)
    for telemetry in (tracing, metrics):
        telemetry.configure(f"tandem-{name}", settings.otlp_endpoint or None, instance_id=worker.incarnation)
    return run(worker.main, settings.loop_stall_seconds)


class _Worker:
    """One run of a worker process."""

    def __init__(
        self, settings: WorkerSettings, role: pb.WorkerRole.ValueType, name: str, make_connector: MakeConnector
    ) -> None:
        self._settings = settings
        self._role = role
        self._name = name
        self._make_connector = make_connector
        self.incarnation = identity.new_incarnation()
        self._member: FleetMember | None = None
        self._host_id = settings.host_id or identity.default_host_id()
        self._address = ""

    async def main(self, drain: asyncio.Event) -> int:
        settings = self._settings
        state_dir = str(paths.state_dir(settings.state_dir or None, "--state-dir"))
        try:
            config = settings.engine_config(state_dir, self.incarnation)
        except ValueError as error:
            logger.error("setting_refused", error=str(error))
            return EXIT_CONFIG
        engine = EngineLink(await EngineClient.start(config))  # it loads the model while this process joins the fleet
        try:
            self._member = await member_of_fleet(settings, WORKER_ROLES[self._role], drain)
        except StoppedEarly:
            await engine.stop()
            return 0
        except BaseException:
            await engine.stop()
            raise
        link = KvLink(self.incarnation, settings.lease_seconds, self._member)
        regions = EngineRegions(engine, link)
        requests = RequestTable()
        connector = self._make_connector(engine, link, regions, requests, settings)
        offload = KVOffload(engine, link, regions, self.incarnation, is_enabled=settings.prompt_cache)
        front = WorkerFront(self.incarnation, engine, requests, connector, offload, settings.engine_timeout_seconds)
        stats.export_metrics(lambda: front.stats)
        return await self._serve(front, link, drain)

    async def _serve(self, front: WorkerFront, link: KvLink, drain: asyncio.Event) -> int:
        settings, assets = self._settings, AssetStore()
        service = WorkerService(front, assets, lambda: self._info(front))
        server = GrpcServer(
            settings.listen,
            lambda grpc_server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc_server),
            [_SERVICE_NAME],
            member=self._member,
            insecure=settings.allows_plaintext,
            has_reflection=settings.grpc_reflection,
        )
        await front.read_memory()
        if self._member is not None:
            self._member.start()
        bound = await server.start()
        self._address = settings.advertise or bound
        registrar = Registrar(settings.control, self._info(front), front.load, member=self._member)
        front.when_ready(lambda asset_paths: self._ready(front, assets, asset_paths, registrar, server))
        front.when_changed(registrar.beat_now)
        link.follow(registrar.kv_service, on_change=lambda: registrar.update_info(self._info(front)))
        registrar.start()
        pump = asyncio.create_task(front.pump())
        await _first(drain.wait(), front.stopped.wait())
        server.set_serving(False)
        if not front.stopped.is_set():
            front.start_draining()
            registrar.beat_now()
            await front.drain(settings.drain_seconds)
        await front.end_streams(_END_STREAMS_SECONDS)
        await registrar.stop()
        await server.stop(grace_seconds=1.0)
        await front.close()
        await link.close()
        if self._member is not None:
            await self._member.close()
        await asyncio.gather(pump, return_exceptions=True)
        return exit_code(front) or (self._member.exit_code if self._member is not None else 0)

    def _ready(
        self,
        front: WorkerFront,
        assets: AssetStore,
        asset_paths: dict[str, str],
        registrar: Registrar,
        server: GrpcServer,
    ) -> None:
        assert front.card is not None, "a worker that is ready has a model card"
        assets.offer(front.card, asset_paths)
        registrar.update_info(self._info(front))
        server.set_serving(True)

    def _info(self, front: WorkerFront) -> pb.WorkerInfo:
        settings = self._settings
        own_id = self._member.identity.id if self._member is not None else settings.worker_id
        return pb.WorkerInfo(
            worker_id=own_id or identity.default_worker_id(self._name, self._host_id, self.incarnation),
            incarnation=self.incarnation,
            role=self._role,
            address=self._address,
            host_id=self._host_id,
            card=front.card,
            kv_address=front.kv_address,
            settings=describe(settings),
            version=version("tandem-serve"),
        )


def exit_code(front: WorkerFront) -> int:
    """Return the exit code for a supervisor: 0 drained, 1 failed, EXIT_CONFIG if a restart would fail again."""
    if front.engine_failure is None:
        return 0
    return EXIT_CONFIG if isinstance(front.engine_failure, InvalidRequest) else 1


async def _first(*waits: Any) -> None:
    """Return when the first of `waits` returns; cancel the others."""
    tasks: Sequence[asyncio.Task[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
