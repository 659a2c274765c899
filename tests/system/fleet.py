"""Real processes for system tests: workers and KV services as subprocesses, the control plane in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet_identity.service import FleetIdentity
from control_plane.gateway import Gateway
from control_plane.generation import NOTHING, TokenRequest
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.router import Route, Router
from control_plane.settings import ControlPlaneSettings
from control_plane.start import open_fleet
from tandem.v1 import kv_transfer_pb2_grpc, worker_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import PeerUnauthenticated, Unavailable

START_SECONDS = 90.0
_STUBS: dict[str, Any] = {
    "prefill": worker_pb2_grpc.WorkerServiceStub,
    "decode": worker_pb2_grpc.WorkerServiceStub,
    "encode": worker_pb2_grpc.EncodeServiceStub,
    "kv": kv_transfer_pb2_grpc.KvTransferServiceStub,
}
_WITH_KV = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
_MODULES = {"prefill": "prefill_svc", "decode": "decode_svc", "encode": "encode_svc", "kv": "kv_transfer_svc"}


@dataclass(eq=False)
class Service:
    """One subprocess and its log."""

    role: str
    worker_id: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


class Fleet:
    """Starts services, waits for them, asks them for their own figures, and ends them.

    With `certificates` the control plane is the fleet's authority and the services join it, as without any setting;
    else all is in plain text, or with the certificates that `control` and the services' flags name. Services are known
    by the name that they were started with, although with certificates each has an id of its own.
    """

    identity: FleetIdentity
    """The fleet's authority, inside the block; with `certificates` only."""

    def __init__(self, folder: Path, *, certificates: bool = False, **control: Any) -> None:
        self._folder = folder
        self._state_dir = Path(control.pop("state_dir", folder / "state"))
        self._state_dir.mkdir(mode=0o700, exist_ok=True)
        addresses = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "enrolment_listen": "127.0.0.1:0"}
        # One probe, when the fleet is ready, and none in the middle of what a test counts.
        probes = {"probe_interval_seconds": 600.0, "probe_valid_seconds": 3600.0}
        # Disaggregation is what most tests are about: no prompt is too short for it.
        handed_over = {"local_prefill": "never"}
        # Nor is a wait too long on a busy machine.
        patient = {"budgets": ("*=0/0",)}
        settings = {**addresses, **probes, **handed_over, **patient, "state_dir": str(self._state_dir), **control}
        self._settings = ControlPlaneSettings(**settings)
        self._has_authority = certificates
        if not certificates:
            self.gateway = Gateway(self._settings)
        self.services: dict[str, Service] = {}
        self._opened = AsyncExitStack()
        self._drain = asyncio.Event()
        self._running: asyncio.Task[int] | None = None

    @property
    def settings(self) -> ControlPlaneSettings:
        """The settings of the control plane; another gateway of the fleet has its own addresses, and else the same."""
        return self._settings

    @property
    def base_url(self) -> str:
        return f"http://{self.gateway.http_address}"

    @property
    def registry(self) -> WorkerRegistry:
        return self.gateway.registry

    def worker(self, name: str) -> Worker | None:
        """Return what is registered of a service, by the name that it was started with."""
        return _named(self.registry, name)

    async def __aenter__(self) -> Fleet:
        if self._has_authority:
            self.identity = await self._opened.enter_async_context(open_fleet(self._settings))
            self.gateway = self._new_gateway(self._settings)
        self._running = asyncio.create_task(self.gateway.run(self._drain))
        await asyncio.wait_for(self.gateway.started.wait(), START_SECONDS)
        return self

    def drain_gateway(self) -> asyncio.Task[int]:
        """Begin to end the control plane, as SIGTERM does; the task returns its exit code."""
        assert self._running is not None, "entered before"
        self._drain.set()
        return self._running

    async def restart_gateway(self, **control: Any) -> None:
        """End the control plane and start another, with another memory, at the same gRPC address.

        `control`: settings that the new one has otherwise.
        """
        self._drain.set()
        assert self._running is not None, "entered before"
        await self._running
        self._drain = asyncio.Event()
        self.gateway = self._new_gateway(replace(self._settings, grpc_listen=self.gateway.grpc_address, **control))
        self._running = asyncio.create_task(self.gateway.run(self._drain))
        await asyncio.wait_for(self.gateway.started.wait(), START_SECONDS)

    def _new_gateway(self, settings: ControlPlaneSettings) -> Gateway:
        return Gateway(settings, self.identity if self._has_authority else None)

    async def __aexit__(self, *exc_info: object) -> None:
        for service in self.services.values():
            if service.process.poll() is None:
                service.kill(signal.SIGTERM)
        await asyncio.gather(*(self.ended(service) for service in self.services.values()))
        self._drain.set()
        assert self._running is not None, "entered before"
        await self._running
        await self._opened.aclose()

    def start(
        self,
        role: str,
        worker_id: str,
        *flags: str,
        env: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Service:
        """Start a service, by a module that takes its name and runs it if one is given; it registers by itself."""
        log = self._folder / f"{worker_id}.log"
        command = [
            sys.executable,
            "-m",
            *launcher,
            _MODULES[role],
            "--control",
            self.gateway.grpc_address,
            "--worker-id",
            worker_id,
            "--state-dir",
            str(self._state_dir),
        ]
        if self.gateway.member is None:
            command += ["--insecure-plaintext"]
        if "--host-id" not in flags:
            command += ["--host-id", "host-a"]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*command, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TANDEM_LOG_JSON": "false", **(env or {})},
            )
        service = Service(role, worker_id, process, log)
        self.services[worker_id] = service
        return service

    async def ready(self, *worker_ids: str, seconds: float = START_SECONDS) -> None:
        """Wait until these workers (all, if none is named) may be given requests."""
        wanted = worker_ids or tuple(self.services)

        def all_ready() -> bool:
            for worker_id in wanted:
                service = self.services[worker_id]
                assert service.process.poll() is None, f"{worker_id} ended:\n{service.tail()}"
            found = [self.worker(worker_id) for worker_id in wanted]
            has_kv = not self.registry.workers(pb.WORKER_ROLE_KV) or all(
                worker is None or worker.role not in _WITH_KV or worker.info.kv_address for worker in found
            )
            return has_kv and all(worker is not None and worker.is_usable for worker in found)

        await until(all_ready, seconds, lambda: self.tails(wanted))
        await self.gateway.catalog.prefetch()

    async def heard(self, num_heartbeats: int = 4) -> None:
        """Wait until each worker has sent so many heartbeats: the first may have waited here for too long."""
        last = dict.fromkeys(self.services, 0.0)
        missing = dict.fromkeys(self.services, num_heartbeats + 1)  # what was there before is not counted

        def all_heard() -> bool:
            for name in missing:
                worker = self.worker(name)
                if worker is not None and worker.last_heartbeat > last[name]:
                    last[name] = worker.last_heartbeat
                    missing[name] -= 1
            return all(num <= 0 for num in missing.values())

        await until(all_heard, START_SECONDS, lambda: f"{missing}\n{self.tails(self.services)}")

    async def proven(self) -> None:
        """Wait until the control plane's own probe has gone the whole way."""

        async def is_ready() -> bool:
            is_ready, details = await self.gateway.prober.check()
            return is_ready and all(state in ("proven", "full") for state in details["states"].values())

        await until(is_ready, 30, lambda: self.tails(self.services))

    async def handed_over(self, model_id: str, prefill: str, decode: str) -> None:
        """Wait until a prompt's KV cache goes from one worker to the other.

        While this process stood still, the services lost their control plane: for lack of a KV service, decode computes
        the first prompts after that itself.
        """

        async def num_imported() -> float:
            return (await self.stats(decode)).counters["blocks_imported"]

        async def is_handed_over() -> bool:
            before = await num_imported()
            request = token_request(model_id, range(7, 47), 2, cacheable=False)
            await tokens_of(self.dispatcher(decode, prefill), request)
            return await num_imported() > before

        await until(is_handed_over, 30, lambda: self.tails(self.services))

    async def ended(self, service: Service, seconds: float = 30.0) -> int:
        """Wait for a process to end; returns its exit code."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(service.process.wait), seconds)
        except TimeoutError:
            service.kill()
            raise AssertionError(f"{service.worker_id} did not end:\n{service.tail()}") from None

    async def stats(self, worker_id: str) -> pb.LoadReport:
        """Ask a service itself for its figures."""
        service = self.services[worker_id]
        worker = self.worker(worker_id)
        assert worker is not None, f"{worker_id} is not registered:\n{service.tail()}"
        async with open_worker_channel(worker.info, self.gateway.member) as channel:
            reply = await _STUBS[service.role](channel).Stats(pb.StatsRequest(), timeout=10)
        return cast(pb.LoadReport, reply.load)

    async def pools_are_full(self, seconds: float = 20.0) -> None:
        """Wait until no service holds anything for anyone, by its own figures."""
        found: dict[str, str] = {}

        async def nothing_is_left() -> bool:
            found.clear()
            for worker_id in filter(self._is_running, self.services):
                try:
                    load = await self.stats(worker_id)
                except (Unavailable, PeerUnauthenticated) as error:  # a clock that was wrong a moment ago
                    found[worker_id] = error.message
                else:
                    if not _is_idle(load):
                        found[worker_id] = str(load)
            return not found

        await until(nothing_is_left, seconds, lambda: f"{found}\n{self.tails(self.services)}")

    def dispatcher(self, decode: str, prefill: str | None = None) -> Dispatcher:
        """Return a dispatcher that uses just these workers; without a prefill worker it runs aggregated."""
        return self.gateway.make_dispatcher(PinnedRouter(self.registry, decode, prefill))

    def tails(self, worker_ids: Sequence[str] | dict[str, Service]) -> str:
        return "\n\n".join(f"--- {worker_id}\n{self.services[worker_id].tail(15)}" for worker_id in worker_ids)

    def _is_running(self, worker_id: str) -> bool:
        return self.services[worker_id].process.poll() is None and self.worker(worker_id) is not None


def _named(registry: WorkerRegistry, name: str) -> Worker | None:
    """Return the worker of this id, or of this --worker-id: with certificates the id is the certificate's."""
    found = (worker for worker in registry.workers() if worker.info.settings.get("worker_id") == name)
    return registry.get(name) or next(found, None)


class PinnedRouter(Router):
    """Routes everything to the workers named."""

    def __init__(self, registry: WorkerRegistry, decode: str, prefill: str | None) -> None:
        super().__init__(registry)
        self._names = decode, prefill

    def choose(self, request: RoutingRequest, avoid: Any = ()) -> Route:
        decode, prefill = (_named(self._registry, name) if name else None for name in self._names)
        assert decode is not None, f"{self._names[0]} is not registered"
        return Route(prefill, (decode,), {}, {})


async def until(
    condition: Callable[[], bool | Awaitable[bool]], seconds: float, describe: Callable[[], str] = lambda: ""
) -> None:
    """Wait for a condition, checked often; fails with a description once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{describe()}"
        await asyncio.sleep(0.05)


async def tokens_of(dispatcher: Dispatcher, request: TokenRequest) -> list[list[int]]:
    """Run a request to its end; returns the tokens of each choice, stop tokens included."""
    stream = await dispatcher.submit(request)
    choices: list[list[int]] = [[] for _ in request.choice_seeds]
    async for delta in stream:
        choices[delta.choice_index].extend(delta.token_ids)
    return choices


_num_requests = 0


def token_request(model_id: str, token_ids: Sequence[int], max_tokens: int, **changes: Any) -> TokenRequest:
    """Return a greedy request for token ids; `changes` go to its SamplingParams or to the request itself."""
    global _num_requests
    _num_requests += 1
    if not changes.pop("cacheable", True):
        changes["cache"] = NOTHING
    names = "choice_seeds", "account", "salt", "cache", "num_public_tokens", "deadline"
    ours = {name: changes.pop(name) for name in names if name in changes}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **changes})
    fields = {"account": "test", "choice_seeds": (sampling.seed,), "deadline": time.monotonic() + 60, **ours}
    return TokenRequest(
        request_id=f"test-{_num_requests}", model_id=model_id, token_ids=tuple(token_ids), sampling=sampling, **fields
    )


def _is_idle(load: pb.LoadReport) -> bool:
    pool, service = load.kv, load.kv_service
    is_staging = any(load.counters.get(f"staging_{what}", 0.0) for what in ("slots_held", "blocks_waiting"))
    return (
        not is_staging
        and load.num_running + load.num_waiting == 0
        and pool.num_used_blocks == pool.num_held_blocks == 0
        and pool.num_free_blocks + pool.num_cached_blocks == pool.num_total_blocks
        and service.num_handles == service.leased_bytes == service.orphan_bytes == 0
        and service.arena_free_bytes == service.arena_bytes
        and service.store.leased_bytes == service.store.filling_bytes == 0
    )
