"""The life of a worker process of any role: load, register, serve, drain."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import grpc

from tandem.v1 import types_pb2 as pb
from tandem_engine.client import EngineClient
from tandem_runtime import identity, log, metrics, paths, tracing
from tandem_runtime.certificates.membership import WORKER_ROLES, FleetMember
from tandem_runtime.enrolment.membership import StoppedEarly, member_of_fleet
from tandem_runtime.lifecycle import run
from tandem_runtime.metrics_endpoint import MetricsEndpoint
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer
from tandem_runtime.settings import describe
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_state import EXIT_CONFIG, EngineState
from tandem_worker.model_card import AssetStore
from tandem_worker.settings import EngineSettings

logger = log.get_logger(__name__)

_END_STREAMS_SECONDS = 1.0


class Front(Protocol):
    """What a role does with the events of its engine and the calls of gateways."""

    card: pb.ModelCard | None
    state: EngineState

    @property
    def kv_address(self) -> str:
        """The KV service that the worker uses; "" for none."""

    def when_ready(self, callback: Callable[[dict[str, str]], None]) -> None:
        """Call `callback` with the paths of the assets once the worker is ready."""

    def load(self) -> pb.LoadReport: ...

    async def pump(self) -> None:
        """Handle the engine's events until it ends; then `state.stopped` is set."""

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until the running requests have finished, at most so long."""

    async def end_streams(self, timeout_seconds: float) -> None: ...

    async def close(self) -> None: ...


class WorkerProcess(ABC):
    """One run of a worker process. A subclass has the front and the service of its role."""

    def __init__(self, settings: EngineSettings, role: pb.WorkerRole.ValueType) -> None:
        self.incarnation = identity.new_incarnation()
        self._settings = settings
        self._role = role
        self._name = WORKER_ROLES[role]
        self._member: FleetMember | None = None
        self._host_id = settings.host_id or identity.default_host_id()
        self._address = ""

    def run(self) -> int:
        """Run until a signal drains the worker or its engine dies; return the exit code."""
        settings, name = self._settings, f"tandem-{self._name}"
        log.configure(name, settings.log_json)
        for telemetry in (tracing, metrics):
            telemetry.configure(name, settings.otlp_endpoint or None, instance_id=self.incarnation)
        return run(self._main, settings.loop_stall_seconds)

    @abstractmethod
    def make_front(self, engine: EngineLink, member: FleetMember | None) -> Front:
        """Return the front of this role; called once, before anything is served."""

    @property
    @abstractmethod
    def service_name(self) -> str:
        """The full name of the gRPC service, for health and reflection."""

    @abstractmethod
    def add_service(self, server: grpc.aio.Server, assets: AssetStore, info: Callable[[], pb.WorkerInfo]) -> None:
        """Add the service that gateways call, of the front that `make_front` returned."""

    def registers(self, registrar: Registrar, info: Callable[[], pb.WorkerInfo]) -> None:  # noqa: B027 - may do nothing
        """Called before `registrar` starts."""

    async def close(self) -> None:  # noqa: B027 - may do nothing
        """Close what the role has besides its front."""

    async def _main(self, drain: asyncio.Event) -> int:
        settings = self._settings
        state_dir = str(paths.state_dir(settings.state_dir or None, "--state-dir"))
        try:
            config = settings.engine_config(state_dir, self.incarnation)
            program = settings.engine_program(state_dir)
        except ValueError as error:
            logger.error("setting_refused", error=str(error))
            return EXIT_CONFIG
        engine = EngineLink(
            await EngineClient.start(config, program)
        )  # loads the model while this process joins the fleet
        try:
            self._member = await member_of_fleet(settings, WORKER_ROLES[self._role], drain)
        except StoppedEarly:
            await engine.stop()
            return 0
        except BaseException:
            await engine.stop()
            raise
        return await self._serve(self.make_front(engine, self._member), drain)

    async def _serve(self, front: Front, drain: asyncio.Event) -> int:
        settings, assets = self._settings, AssetStore()

        def info() -> pb.WorkerInfo:
            return self._info(front)

        server = GrpcServer(
            settings.listen,
            lambda grpc_server: self.add_service(grpc_server, assets, info),
            [self.service_name],
            member=self._member,
            insecure=settings.allows_plaintext,
            has_reflection=settings.grpc_reflection,
        )
        await front.state.read_memory()
        if self._member is not None:
            self._member.start()
        bound = await server.start()
        self._address = settings.advertise or bound
        self._metrics = MetricsEndpoint(settings.metrics_listen, self._member, insecure=settings.allows_plaintext)
        await self._metrics.start()
        registrar = Registrar(settings.control, info(), front.load, member=self._member)

        def ready(asset_paths: dict[str, str]) -> None:
            assert front.card is not None, "a worker that is ready has a model card"
            assets.offer(front.card, asset_paths)
            registrar.update_info(info())
            server.set_serving(True)

        front.when_ready(ready)
        front.state.when_changed(registrar.beat_now)
        self.registers(registrar, info)
        registrar.start()
        pump = asyncio.create_task(front.pump())
        await _first(drain.wait(), front.state.stopped.wait())
        server.set_serving(False)
        if not front.state.stopped.is_set():
            front.state.start_draining()
            registrar.beat_now()
            await front.drain(settings.drain_seconds)
        await front.end_streams(_END_STREAMS_SECONDS)
        await registrar.stop()
        await server.stop(grace_seconds=1.0)
        await self._metrics.stop()
        await front.close()
        await self.close()
        if self._member is not None:
            await self._member.close()
        await asyncio.gather(pump, return_exceptions=True)
        return front.state.exit_code or (self._member.exit_code if self._member is not None else 0)

    def _info(self, front: Front) -> pb.WorkerInfo:
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
            metrics_address=self._metrics.address_for_others(self._address),
            metrics_tls=self._metrics.is_encrypted,
        )


async def _first(*waits: Any) -> None:
    """Return when the first of `waits` returns; cancel the others."""
    tasks: Sequence[asyncio.Task[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
