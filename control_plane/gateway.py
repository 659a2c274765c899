"""Builds one control-plane process and runs it until it has drained."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import grpc
import uvicorn

from control_plane.accounts.prices import PriceTable
from control_plane.accounts.service import Accounts
from control_plane.admission.budgets import BudgetTable
from control_plane.api.http.connections import ConnectionLimits, Connections
from control_plane.api.http.request_context import HttpSettings
from control_plane.api.http.request_guard import LOCAL_HOSTS
from control_plane.api.http.server import listen_longer, server_config
from control_plane.app import create_app
from control_plane.audit import gauges
from control_plane.audit.auditor import Auditor
from control_plane.audit.table_reader import TableReader
from control_plane.block_events import BlockEventReader
from control_plane.dispatch import admission_counts
from control_plane.dispatch.block_hashes import cache_salt
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.encoding import EncodingDispatch
from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.drain import Drain, time_is_over
from control_plane.events.kinds import KINDS
from control_plane.events.log import EventLog
from control_plane.events.request_watch import RequestWatch
from control_plane.events.store import EventStore
from control_plane.events.worker_names import WorkerNames
from control_plane.events.worker_watch import WorkerWatch
from control_plane.explain.requests import Requests
from control_plane.explain.store import ExplanationStore
from control_plane.fleet import fleet_metrics
from control_plane.fleet.draining import WorkerDrain
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.model_catalog import REGISTRATION_SECONDS, SETTLING_SECONDS, ModelCatalog
from control_plane.fleet.registration import ControlPlaneService, take_relayed
from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.status import FleetStatus
from control_plane.fleet.worker_addresses import WorkerAddresses, parse_networks
from control_plane.fleet.worker_health import WorkerHealth
from control_plane.fleet.worker_links import LinkPool
from control_plane.fleet_identity.service import FleetIdentity
from control_plane.generation import AccountPolicies
from control_plane.listening import allow_many_connections, listen
from control_plane.live.cache_history import CacheHistory
from control_plane.live.feed import LiveFeed
from control_plane.live.fleet_rows import FleetRows
from control_plane.readiness import Prober
from control_plane.request_metrics import RequestMetrics
from control_plane.routing.compiled_library import CompiledRouting
from control_plane.routing.router import Router
from control_plane.routing.sample_points import SamplePointIndex
from control_plane.secrets import kv_keys, load_secret
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import database_url
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.text_service import TextService
from control_plane.text_processes.pool import TextLimits, TextProcesses
from control_plane.worker_probe import WorkerProbe
from tandem.v1 import control_plane_pb2_grpc
from tandem_runtime import identity, paths
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.log import get_logger
from tandem_runtime.metrics_endpoint import MetricsEndpoint
from tandem_runtime.server import GrpcServer, is_loopback, split_address
from tandem_runtime.tasks import supervised

log = get_logger(__name__)

_SWEEP_SECONDS = 0.25
_STOP_SECONDS = 5
"""For answers to write their error once the time to drain is over."""
_UNANSWERED_SECONDS = 1.0
"""After that, what has no answer yet gets one: its body was still coming, or it waited for another process."""


class Gateway:
    """Owns the registry, the dispatcher and both servers of one control-plane process."""

    def __init__(
        self,
        settings: ControlPlaneSettings,
        fleet: FleetIdentity | None = None,
        compiled: CompiledRouting | None = None,
    ) -> None:
        """`fleet` is open; without it the gateway has the certificate of its settings, or none: `start.py` decides.

        `compiled`: what routing has of C++; None: numpy does the same.
        """
        self._settings = settings
        self._fleet = fleet
        state_dir = paths.state_dir(settings.state_dir or None, "--state-dir")
        secret = load_secret(settings.secret, state_dir)
        self._incarnation = incarnation = identity.new_incarnation()
        until = settings.plaintext_until_unix_seconds
        self.member = (
            FleetMember.from_settings(settings, "gateway", until) if fleet is None else fleet.new_member(until)
        )
        self._database_url = database_url(settings.database_url, state_dir)
        self.registry = WorkerRegistry(settings.suspect_seconds, settings.gone_seconds, grain=settings.hash_grain)
        gateway_id = f"gateway-{incarnation}"
        self._links = LinkPool(self.registry, gateway_id, incarnation, self.member)
        self._kv_clients = KvClients(incarnation, self.member)
        self.registry.listen(self._kv_clients.changed)
        self._secret = secret
        self._public_prefixes = PublicPrefixes.read(settings.public_prefixes)
        self.text_processes = TextProcesses(
            _text_limits(settings), self._public_prefixes, settings.tokenizer_cache_bytes
        )
        self.catalog = ModelCatalog(
            self.registry,
            models=settings.models,
            fallback_model=settings.fallback_model,
            member=self.member,
            loader=self.text_processes.zygote,
            max_gone_bytes=settings.tokenizer_cache_bytes,
            grain=settings.hash_grain,
            registration_seconds=REGISTRATION_SECONDS,
            settling_seconds=SETTLING_SECONDS,
        )
        self.text_processes.zygote.keep(self.catalog.served_text_keys)
        self._encoder_clients = EncoderClients(self.registry, self.member, gateway_id, incarnation)
        self._encoders = EncodingDispatch(
            self.registry,
            self._encoder_clients,
            settings.queue_seconds,
            settings.max_waiting,
            settings.max_waiting_per_account,
        )
        proofs = ReadinessProofs(self.registry)
        self.health = WorkerHealth(self.registry)
        prefixes = SamplePointIndex(settings.prefix_index_blocks, compiled=compiled)
        self._block_events = BlockEventReader(
            prefixes, self.registry, incarnation, self.member, on_heartbeat=partial(take_relayed, self.registry)
        )
        router = Router(self.registry, settings.local_prefill, prefixes, health=self.health, compiled=compiled)
        self.dispatcher = self.make_dispatcher(router, proofs)
        grants = self.dispatcher.rooms.num_granted, self._encoder_clients.num_granted
        admission_counts.export((self.dispatcher.queue, self._encoders.queue), *grants)
        self._probe: WorkerProbe | None = None
        self.http_address = ""
        self.grpc_address = ""
        self.started = asyncio.Event()
        self.draining = Drain()
        self.prober = Prober(
            self.registry,
            self.catalog,
            self.dispatcher,
            proofs,
            settings.probe_interval_seconds,
            settings.probe_valid_seconds,
        )
        self.auditor = Auditor(
            self.registry,
            self._links,
            gateway_id,
            TableReader(self._links, self._block_events, member=self.member),
            is_alone=len(settings.replicas) <= 1,
            audit_seconds=settings.audit_seconds,
            grace_seconds=settings.audit_grace_seconds,
        )
        gauges.export(lambda: self.auditor.report)
        fleet_metrics.export(self.registry, self.health)
        self.requests = Requests(incarnation, with_texts=settings.explain_texts)
        request_metrics = RequestMetrics(self.requests)
        self.requests.listen(request_metrics.ended)
        self.requests.listen_to_first_tokens(request_metrics.first_token_left)
        names = WorkerNames(self.registry)
        self.events = EventLog(incarnation, lambda: round(time.time() * 1000), names.of)
        worker_watch = WorkerWatch(self.registry, self.events.record)
        request_watch = RequestWatch(self.events.record)
        self.requests.listen(request_watch.ended)
        self.events.before_flush(request_watch.flush)
        self.events.before_flush(worker_watch.look)
        self._event_store: EventStore | None = None
        self._explanations: ExplanationStore | None = None
        self.live = LiveFeed(
            FleetRows(self.registry, self._orphan_bytes_of, self.catalog.problem_of, health_of=self.health.status),
            CacheHistory(self.registry),
            gateway=incarnation,
            models=lambda: [model.model_id for model in self.catalog.list()],
            requests=self.requests,
            events=self.events,
            event_kinds=tuple(KINDS),
        )
        self.metrics = MetricsEndpoint(settings.metrics_listen, self.member, insecure=settings.allows_plaintext)

    def make_dispatcher(self, router: Router, proofs: ReadinessProofs | None = None) -> Dispatcher:
        """Return a dispatcher over this gateway's links that takes its routes from `router`.

        With `proofs` it is the gateway's own; workers do not hear what waits in others.
        """
        return Dispatcher(
            self.registry,
            self._links,
            router,
            self.catalog,
            self._kv_clients,
            self._secret,
            self._settings.accept_seconds,
            self._settings.queue_seconds,
            self._settings.max_waiting,
            self._settings.max_waiting_per_account,
            accounts=AccountPolicies.parse(self._settings.prompt_cache_accounts),
            max_unread_tokens=self._settings.max_unread_tokens,
            proofs=proofs,
            macs_until=self._settings.macs_until,
            grain=self._settings.hash_grain,
            budgets=BudgetTable.parse(self._settings.budgets),
            reports_waiting=proofs is not None,
        )

    async def run(self, drain: asyncio.Event) -> int:
        """Serve until `drain` is set; then let running requests finish."""
        settings = self._settings
        self.dispatcher.router.prefixes.take_memory()
        prices = PriceTable.parse(settings.prices).over(settings.models)
        accounts = Accounts(
            self._database_url, self._incarnation, prices, settings.gateway_gone_seconds, settings.report_seconds
        )
        if settings.explain_hours:
            self._explanations = ExplanationStore(accounts.database, settings.explain_hours, settings.explain_rows)
            self.requests.keep_in(self._explanations)
        self._event_store = EventStore(accounts.database, settings.events_days, settings.events_rows)
        try:
            with self.events.tapping():
                code = await self._run(drain, accounts)
                log.info("gateway_stopped")
                return code
        finally:
            await self.text_processes.close()
            await self.events.close()
            if self._explanations is not None:
                await self._explanations.close()
            await accounts.close()
            if self.member is not None:
                await self.member.close()

    async def _run(self, drain: asyncio.Event, accounts: Accounts) -> int:
        self.text_processes.start()
        if self.member is not None:
            self.member.start()
        await accounts.open()
        for queue in (self.dispatcher.queue, self._encoders.queue):
            queue.bound_accounts_while(accounts.authenticator.has_accounts)
        if self._event_store is not None:
            await self.events.open(self._event_store)
        host = split_address(self._settings.listen)[0]
        is_local = await is_loopback(host)
        if not is_local:
            await accounts.check_exposed(self._settings.listen)
        http_socket = await listen(
            self._settings.listen,
            insecure=self._settings.allows_plaintext or self._settings.insecure_http,
            reuse_port=self._settings.reuse_port,
            stalled_client_seconds=self._settings.stalled_client_seconds,
        )
        connections = Connections(self._connection_limits(allow_many_connections()))
        grpc_server = GrpcServer(
            self._settings.grpc_listen,
            self._add_services,
            ["tandem.v1.ControlPlaneService"],
            member=self.member,
            insecure=self._settings.allows_plaintext,
            has_reflection=self._settings.grpc_reflection,
        )
        await self.metrics.start()
        self.http_address, self.grpc_address = _address(http_socket), await grpc_server.start()
        grpc_server.set_serving(True)
        log.info("listening", http=self.http_address, grpc=self.grpc_address)
        self._say_if_drain_is_short()
        self.started.set()
        allowed_hosts = (*LOCAL_HOSTS, host, *self._settings.allowed_hosts)
        is_checked = is_local or bool(self._settings.allowed_hosts)
        http = _HttpServer(self._http_config(accounts, connections, allowed_hosts if is_checked else None))
        serving = asyncio.create_task(http.serve(sockets=[http_socket]))
        loops = self.background(accounts)
        background = [asyncio.create_task(supervised(name, loop), name=name) for name, loop in loops.items()]
        draining = asyncio.create_task(drain.wait())
        ended, _ = await asyncio.wait([draining, serving], return_when=asyncio.FIRST_COMPLETED)
        self.draining.begin()
        http.should_exit = True
        self.live.close()
        await self._drained(serving, accounts)
        for task in [draining, *background]:
            task.cancel()
        await asyncio.gather(draining, *background, return_exceptions=True)
        await self.auditor.close()
        await self.dispatcher.close()
        if self._probe is not None:
            await self._probe.close()
        await self._links.close()
        await self._encoder_clients.close()
        await self._kv_clients.close()
        await self._block_events.close()
        self._registration.close()
        await grpc_server.stop(grace_seconds=1.0)
        await self.metrics.stop()
        for task in ended:
            task.result()  # raises the error of an HTTP server that ended too early
        return 0

    async def _drained(self, serving: asyncio.Task[None], accounts: Accounts) -> None:
        """Wait for the running requests; those left after the time to drain end with an error."""
        seconds = self._settings.longest_drain_seconds
        log.info("draining", num_requests=self._num_requests, seconds=seconds)
        done, _ = await asyncio.wait([serving], timeout=seconds)
        if not done:
            log.warning("drain_timed_out", num_requests=self._num_requests, seconds=seconds)
            accounts.metering.gateway_ends()
            self.dispatcher.stop(time_is_over)
            self._encoders.stop(time_is_over)
            done, _ = await asyncio.wait([serving], timeout=_UNANSWERED_SECONDS)
        if not done:
            self.draining.end()
        await serving

    def _say_if_drain_is_short(self) -> None:
        drain, longest = self._settings.longest_drain_seconds, self._settings.request_timeout_seconds
        if drain < longest:
            log.warning("drain_shorter_than_requests", drain_seconds=drain, request_timeout_seconds=longest)

    def _orphan_bytes_of(self, incarnation: str) -> int:
        return sum(orphan["num_bytes"] for orphan in self.auditor.orphans_of(incarnation))

    @property
    def _num_requests(self) -> int:
        return self.dispatcher.num_requests + self._encoders.num_requests

    def background(self, accounts: Accounts) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return what runs beside the servers, by name; supervised: no failure of these ends the gateway."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "sweep": self._sweep,
            "catalog": self.catalog.run,
            "prober": self.prober.run,
            "auditor": self.auditor.run,
            "live": self.live.run,
            "live-events": self.live.run_events,
            "events": self.events.run,
            **({"explanations": self._explanations.run} if self._explanations is not None else {}),
            **accounts.loops,
        }
        return loops | (self._fleet.loops if self._fleet is not None else {})

    def _add_services(self, server: grpc.aio.Server) -> None:
        settings = self._settings
        self._registration = service = ControlPlaneService(
            self.registry,
            kv_keys(self._secret),
            settings.replicas,
            macs_until=settings.macs_until,
            addresses=WorkerAddresses(parse_networks(settings.worker_networks)),
            news=self._fleet,
        )
        control_plane_pb2_grpc.add_ControlPlaneServiceServicer_to_server(service, server)

    def _connection_limits(self, max_open_files: int) -> ConnectionLimits:
        settings = self._settings
        wanted = ConnectionLimits(
            max_connections=settings.max_connections,
            max_unfinished_heads=settings.max_unfinished_heads,
            max_head_bytes=settings.max_head_bytes,
            head_seconds=settings.head_seconds,
            max_body_bytes=settings.max_body_bytes,
            body_stall_seconds=settings.body_stall_seconds,
            min_body_bytes_per_second=settings.min_body_bytes_per_second,
            body_seconds=settings.body_seconds,
            max_bodies_bytes=settings.max_bodies_bytes,
            max_account_bodies_bytes=settings.max_account_bodies_bytes,
        )
        limits = wanted.within(max_open_files)
        if limits != wanted:
            log.warning("connections_limited", max_connections=limits.max_connections, max_open_files=max_open_files)
        return limits

    def _http_config(
        self, accounts: Accounts, connections: Connections, allowed_hosts: tuple[str, ...] | None
    ) -> uvicorn.Config:
        settings = self._settings
        text = TextService(
            self.catalog,
            self.dispatcher,
            default_timeout_seconds=settings.request_timeout_seconds,
            public_prefixes=self._public_prefixes,
            strict_fields=settings.strict_fields,
            encoders=self._encoders,
            meter=accounts.metering,
            preparer=self.text_processes,
            salt_of=partial(cache_salt, self._secret),
            requests=self.requests,
            priority_accounts=settings.priority_accounts,
            door=self.dispatcher,
        )
        http = HttpSettings(
            max_body_bytes=settings.max_body_bytes,
            operator_token=settings.operator_token,
            allowed_hosts=allowed_hosts,
        )
        fleet = FleetStatus(self.registry, self.auditor.orphans_of, self.catalog.problem_of, self.health.status)
        drain = WorkerDrain(self.registry, self.member)
        self._probe = WorkerProbe(self.registry, drain, self.catalog, self.make_dispatcher, self._encoder_clients)
        app = create_app(
            text,
            self.catalog,
            fleet,
            self.prober,
            http,
            accounts,
            self.live,
            self._explanations,
            self._event_store,
            drain,
            self.draining,
            self._probe,
        )
        return server_config(
            app,
            connections,
            forwarded_allow_ips=settings.forwarded_allow_ips,
            timeout_graceful_shutdown=math.ceil(settings.longest_drain_seconds) + _STOP_SECONDS,
        )

    async def _sweep(self) -> None:
        while True:
            more = self.registry.sweep()
            more |= self._registration.ask()
            await asyncio.sleep(0 if more else _SWEEP_SECONDS)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: tandem_runtime.lifecycle decides when to drain."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        listen_longer(sockets or [])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _text_limits(settings: ControlPlaneSettings) -> TextLimits:
    return TextLimits(
        settings.text_processes,
        settings.text_cpu_seconds,
        settings.text_cpu_seconds_per_mb,
        settings.text_memory_mb,
        settings.text_max_waiting,
        settings.text_max_waiting_mb * 1_000_000,
        settings.text_account_mb * 1_000_000,
    )


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"{host}:{port}"
