"""Runs chaos: a fleet on two hosts with two gateways, clients that send requests, and a schedule of faults."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import structlog

from tandem_runtime import loop_lag
from tandem_runtime.garbage import forget_what_is_loaded
from tests.chaos import priorities
from tests.chaos.balance import differences
from tests.chaos.bursts import Bursts
from tests.chaos.client import ask, new_record, rarest_stage
from tests.chaos.co_runners import CoRunners
from tests.chaos.embeddings import EmbeddingQuestion, make_embedding_questions, make_encoder
from tests.chaos.fault_schedule import Fault, FaultSchedule
from tests.chaos.gateway_faults import GatewayFaults
from tests.chaos.http_client import HttpQuestion, HttpStreamRecord, make_http_questions, send_over_http
from tests.chaos.http_gateway import Conditions, HttpGateway, http_client
from tests.chaos.injection import Injector
from tests.chaos.launch import COUNTS, SEED
from tests.chaos.ledger_books import LedgerBooks
from tests.chaos.machine_faults import MachineFaults
from tests.chaos.options import Options
from tests.chaos.pauses import Pauses
from tests.chaos.questions import Question, make_checkpoint, make_questions
from tests.chaos.rotations import Rotations
from tests.chaos.second_gateway import SecondGateway
from tests.chaos.stream_record import StreamRecord
from tests.chaos.surroundings import SECOND_GATEWAY, Surroundings
from tests.chaos.verdict import End, Verdict
from tests.ports import free_ports
from tests.system.fleet import Fleet, Service, until

_HOSTS = ("a", "b")
_SERVICES = tuple(f"{role}-{host}" for host in _HOSTS for role in ("kv", "prefill", "decode", "encode"))
_ROOT = Path(__file__).parents[2]
_HTTP_SHARE = 0.15
_STALL_SECONDS = 0.2
_LEAVING_SHARE = 0.2
_BALANCE_SECONDS = 15.0
"""A gateway that needs nothing gets grants for 5 s more, which expire after 2.5 s."""
_STAGING_BYTES = 24 * 12_288
"""Of the workers of host a, whose pools count as unreadable by others: 24 blocks, fewer than a long prompt has."""


class Run:
    """One run of chaos; gives a verdict also if it was cut short."""

    pauses: Pauses
    gateways: tuple[HttpGateway, SecondGateway]
    gateway_faults: GatewayFaults
    _questions: list[Question]
    _http_questions: list[HttpQuestion]
    _embedding_questions: list[EmbeddingQuestion]
    rotations: Rotations | None = None

    def __init__(self, options: Options, folder: Path) -> None:
        identity: dict[str, Any] = {"certificates": True, "certificate_seconds": options.certificate_seconds}
        self.options = options
        self.folder = folder
        self.counts = folder / "injected"
        self.surroundings = Surroundings.of(folder, (*_SERVICES, SECOND_GATEWAY))
        grpc_addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
        self.fleet = Fleet(
            folder,
            grpc_listen=grpc_addresses[0],
            replicas=grpc_addresses,
            state_dir=str(self.surroundings.kept / "state"),
            suspect_seconds=options.suspect_seconds,
            gone_seconds=options.gone_seconds,
            request_timeout_seconds=90.0,
            audit_seconds=options.lease_seconds / 2,
            max_waiting=options.max_waiting,
            gateway_gone_seconds=options.gateway_gone_seconds,
            **(identity if options.certificate_seconds else {}),
        )
        self.faults = FaultSchedule(
            self.fleet, self._start, MachineFaults(self.surroundings), self._rng("faults"), options
        )
        self.bursts = Bursts(self._send_in_burst, self._rng("bursts"), options)
        self._books = LedgerBooks(self.fleet)
        self._second_address = grpc_addresses[1]
        self.co_runners = CoRunners()
        self.records: list[StreamRecord] = []
        self.http_records: list[HttpStreamRecord] = []
        self._lives = Counter[str]()
        self._numbers = count()
        self._num_sent = 0

    @property
    def all_faults(self) -> list[Fault]:
        """All faults in the order of their times."""
        return sorted((*self.faults.faults, *self.gateway_faults.faults), key=lambda fault: fault.at)

    async def run(self) -> Verdict:
        """Run, and return which laws held."""
        try:
            return await self._run()
        finally:
            self.surroundings.close()

    async def _run(self) -> Verdict:
        injector = Injector(f"{self.options.seed} control", self.counts)
        # The clients' pauses are this loop's, too: its log says when it stood still.
        with logged_to(self.folder / "control.log"), injector.installed(), loop_lag.watched(_STALL_SECONDS):
            async with self.fleet, http_client(self.fleet.base_url) as http:
                self.pauses = Pauses(self.fleet.registry)
                if self.options.certificate_seconds:
                    self.rotations = Rotations(self.fleet.identity.authority, self.options.rotate_seconds)
                conditions = Conditions(self.faults.was_disk_broken, self.bursts.were_under_way)
                second = SecondGateway(self.folder, self._second_address, conditions)
                self.gateways = HttpGateway("gateway-a", http, conditions), second
                self.gateway_faults = GatewayFaults(
                    second, lambda: self.faults.seconds, self._rng("gateway faults"), self.options
                )
                try:
                    return await self._run_with_gateways()
                finally:
                    await second.close()

    async def _run_with_gateways(self) -> Verdict:
        await self._prepare()
        await self._books.begin()
        with self.pauses.watching(self.fleet.gateway.dispatcher):
            failure = await _failure_of(self._faults_and_clients())
        await _failure_of(until(lambda: not self.fleet.gateway.dispatcher.background, 15))
        left = await _failure_of(self.fleet.pools_are_full(4 * self.options.lease_seconds))
        audit = await self.fleet.gateway.auditor.verdict()
        seconds = _BALANCE_SECONDS + self.options.gateway_gone_seconds
        unbalanced = await differences(self.fleet, self.gateways[1], self._books, seconds)
        misbilled = await self._books.mistakes(self.http_records, self.bursts.num_cut_off, seconds)
        return Verdict(
            self, End(failure, left, audit, unbalanced, misbilled, self._books.num_free, self._books.num_lost)
        )

    async def _prepare(self) -> None:
        """Start the fleet, and compute the expected answers meanwhile."""
        first, second = self.gateways
        for worker_id in _SERVICES:
            self._start(worker_id)
        is_plain = not self.options.certificate_seconds
        second.start(self.fleet.settings, self._environment(SECOND_GATEWAY), plaintext=is_plain)
        options = self.options
        self._questions = await asyncio.to_thread(make_questions, self._checkpoint, options.seed, options.num_questions)
        await self.fleet.ready()
        await self.fleet.proven()
        sent_over_http = self._questions[: max(4, len(self._questions) // 4)]
        self._http_questions = await make_http_questions(first.http, sent_over_http, self._rng("http questions"))
        self._embedding_questions = await make_embedding_questions(first.http, self._rng("embedding questions"))
        await second.ready()
        for service in self.fleet.services.values():
            priorities.raise_priority(psutil.Process(service.process.pid))
        forget_what_is_loaded()  # as a gateway does: else a collection of torch's objects stops this one for a second

    def _start(self, worker_id: str) -> Service:
        """Start a service, or its next life."""
        if not self._lives:
            self._checkpoint, self._encoder = make_checkpoint(self.folder), make_encoder(self.folder)
        role, _, host = worker_id.partition("-")
        self._lives[worker_id] += 1
        flags = ("--host-id", f"host-{host}", *self._flags(role, host))
        env = self._environment(worker_id)
        return self.fleet.start(role, worker_id, *flags, env=env, launcher=("tests.chaos.launch",))

    def _environment(self, name: str) -> dict[str, str]:
        """Return what a process needs to have faults on its network, and a clock of its own."""
        clock = self.surroundings.clocks.get(name)
        return {
            "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "protos" / "gen"))),
            SEED: f"{self.options.seed} {name} {self._lives[name]}",
            COUNTS: str(self.counts),
            **priorities.environment(),
            **(clock.environment if clock is not None else {}),
        }

    def _flags(self, role: str, host: str) -> Sequence[str]:
        lease = ("--lease-seconds", str(self.options.lease_seconds))
        if role == "kv":
            disk = ("--disk-bytes", str(32 << 20), "--disk-dir", str(self.surroundings.kept / f"disk-{host}"))
            return *lease, "--arena-bytes", str(16 << 20), "--store-bytes", str(4 << 20), *disk
        watch = ("--engine-timeout-seconds", str(self.options.suspect_seconds))
        if role == "encode":
            return "--model", str(self._encoder), "--num-threads", "1", *watch
        model = ("--model", str(self._checkpoint), "--num-threads", "1", "--dtype", "float32")
        chunks = "96" if role == "prefill" else "128"
        staging = ("--kv-staging", "always", "--kv-staging-bytes", str(_STAGING_BYTES)) if host == "a" else ()
        return (
            *lease,
            *model,
            *watch,
            *staging,
            "--num-kv-blocks",
            "448",
            "--max-num-seqs",
            "32",
            "--max-num-batched-tokens",
            chunks,
        )

    async def _faults_and_clients(self) -> None:
        options = self.options
        runs_of_clients = [
            *(self._client(number) for number in range(options.num_clients)),
            *(self._client_of_second(number) for number in range(options.num_second_clients)),
            *(self._client_of_encoders(number) for number in range(options.num_embedding_clients)),
        ]
        clients = [asyncio.create_task(run) for run in runs_of_clients]
        runs = [part.run(self._is_done) for part in (self.faults, self.gateway_faults, self.bursts)]
        if self.rotations is not None:
            runs.append(self.rotations.run(self._is_done))
        faults = [asyncio.create_task(run) for run in runs]
        watch = asyncio.create_task(self.co_runners.watch())
        try:
            await asyncio.gather(*faults, *clients)
        finally:
            for task in (*faults, watch, *clients):
                task.cancel()
            await asyncio.gather(*faults, watch, *clients, return_exceptions=True)
            await self.faults.end()

    def _is_done(self) -> bool:
        is_long_enough = self.faults.seconds >= self.options.seconds and self._num_sent >= self.options.num_streams
        return is_long_enough and not any(part.has_more for part in (self.faults, self.gateway_faults, self.bursts))

    async def _client(self, client: int) -> None:
        rng = self._rng(f"client {client}")
        while not self._is_done():
            await asyncio.sleep(rng.random() * self.options.max_think_seconds)
            number = next(self._numbers)
            self._num_sent += 1
            rng = self._rng(f"stream {number}")
            if rng.random() < _HTTP_SHARE:
                await self._send_over_http(self.gateways, rng)
            else:
                leave_at = rarest_stage(rng, self.records) if rng.random() < _LEAVING_SHARE else None
                record = new_record(rng, f"chaos-{number}", self._questions, leave_at=leave_at)
                await ask(self.fleet.gateway.dispatcher, record, rng, self.pauses, self.bursts.were_under_way)
                self.records.append(record)  # a stream that the end of the run cuts off is not recorded

    async def _client_of_second(self, client: int) -> None:
        """Ask the second gateway, and the first one while that refuses."""
        rng = self._rng(f"client of {SECOND_GATEWAY} {client}")
        while not self._is_done():
            await asyncio.sleep(rng.random() * self.options.max_think_seconds)
            await self._send_over_http(self.gateways[::-1], rng)

    async def _client_of_encoders(self, client: int) -> None:
        """Ask for vectors at both gateways in turn."""
        rng = self._rng(f"client of encoders {client}")
        while not self._is_done():
            await asyncio.sleep(rng.random() * self.options.max_think_seconds)
            record = HttpStreamRecord(rng.choice(self._embedding_questions), is_streamed=False)
            await send_over_http(self.gateways[:: rng.choice((1, -1))], record)
            self.http_records.append(record)

    async def _send_in_burst(self, rng: random.Random, number: int) -> HttpStreamRecord:
        """Ask one of the shortest questions: a burst is about how many there are, and ends sooner."""
        shortest = sorted(self._http_questions, key=lambda each: each.num_prompt_tokens + each.num_completion_tokens)
        question = rng.choice(shortest[: max(2, len(shortest) // 3)])
        record = HttpStreamRecord(question, is_streamed=False)
        await send_over_http(self.gateways if number % 2 else self.gateways[::-1], record)
        self.http_records.append(record)
        return record

    async def _send_over_http(self, gateways: Sequence[HttpGateway], rng: random.Random) -> None:
        leave_after = rng.randrange(20) if rng.random() < _LEAVING_SHARE else None
        record = HttpStreamRecord(rng.choice(self._http_questions), leave_after=leave_after)
        await send_over_http(gateways, record)
        self.http_records.append(record)

    def _rng(self, of: str) -> random.Random:
        return random.Random(f"{self.options.seed} {of}")


async def _failure_of(steps: Coroutine[Any, Any, None]) -> str:
    """Return the failure of the run's steps as text, "" without one; the verdict follows either way."""
    try:
        await steps
    except AssertionError as error:
        return str(error)
    return ""


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """Write the logs of the control plane, which runs in this process, to a file."""
    with file.open("a") as lines:
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
            ],
            logger_factory=structlog.WriteLoggerFactory(lines),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()
