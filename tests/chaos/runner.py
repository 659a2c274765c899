"""Runs chaos: a fleet on two hosts, clients that send requests, and a schedule of faults."""

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

import httpx
import structlog

from tests.chaos.client import ask, new_record
from tests.chaos.co_runners import CoRunners
from tests.chaos.fault_schedule import FaultSchedule
from tests.chaos.http_client import HttpQuestion, HttpStreamRecord, make_http_questions, send_over_http
from tests.chaos.injection import Injector
from tests.chaos.launch import COUNTS, SEED
from tests.chaos.machine_faults import MachineFaults
from tests.chaos.options import Options
from tests.chaos.pauses import Pauses
from tests.chaos.questions import Question, make_checkpoint, make_questions
from tests.chaos.rotations import Rotations
from tests.chaos.stream_record import StreamRecord
from tests.chaos.surroundings import Surroundings
from tests.chaos.verdict import Verdict
from tests.system.fleet import Fleet, Service, until

_HOSTS = ("a", "b")
_SERVICES = tuple(f"{role}-{host}" for host in _HOSTS for role in ("kv", "prefill", "decode"))
_ROOT = Path(__file__).parents[2]
_HTTP_SHARE = 0.15
_LEAVING_SHARE = 0.2
_STAGING_BYTES = 24 * 12_288
"""Of the workers of host a, whose pools count as unreadable by others: 24 blocks, fewer than a long prompt has."""


class Run:
    """One run of chaos; gives a verdict also if it was cut short."""

    pauses: Pauses
    rotations: Rotations | None = None

    def __init__(self, options: Options, folder: Path) -> None:
        identity: dict[str, Any] = {"certificates": True, "certificate_seconds": options.certificate_seconds}
        self.options = options
        self.folder = folder
        self.counts = folder / "injected"
        self.surroundings = Surroundings.of(folder, _SERVICES)
        self.fleet = Fleet(
            folder,
            state_dir=str(self.surroundings.kept / "state"),
            suspect_seconds=options.suspect_seconds,
            gone_seconds=options.gone_seconds,
            request_timeout_seconds=90.0,
            audit_seconds=options.lease_seconds / 2,
            **(identity if options.certificate_seconds else {}),
        )
        self.faults = FaultSchedule(
            self.fleet, self._start, MachineFaults(self.surroundings), self._rng("faults"), options
        )
        self.co_runners = CoRunners()
        self.records: list[StreamRecord] = []
        self.http_records: list[HttpStreamRecord] = []
        self._lives = Counter[str]()
        self._numbers = count()
        self._num_sent = 0

    async def run(self) -> Verdict:
        """Run, and return which laws held."""
        try:
            return await self._run()
        finally:
            self.surroundings.close()

    async def _run(self) -> Verdict:
        injector = Injector(f"{self.options.seed} control", self.counts)
        with logged_to(self.folder / "control.log"), injector.installed():
            async with self.fleet, httpx.AsyncClient(base_url=self.fleet.base_url, timeout=120) as http:
                self.pauses = Pauses(self.fleet.registry)
                if self.options.certificate_seconds:
                    self.rotations = Rotations(self.fleet.identity.authority, self.options.rotate_seconds)
                questions, http_questions = await self._prepare(http)
                with self.pauses.watching(self.fleet.gateway.dispatcher):
                    failure = await _failure_of(self._faults_and_clients(http, questions, http_questions))
                await _failure_of(until(lambda: not self.fleet.gateway.dispatcher.background, 15))
                left = await _failure_of(self.fleet.pools_are_full(4 * self.options.lease_seconds))
                audit = await self.fleet.gateway.auditor.verdict()
                return Verdict(self, failure, left, audit)

    async def _prepare(self, http: httpx.AsyncClient) -> tuple[list[Question], list[HttpQuestion]]:
        """Start the fleet, and compute the expected answers meanwhile."""
        for worker_id in _SERVICES:
            self._start(worker_id)
        options = self.options
        questions = await asyncio.to_thread(make_questions, self._checkpoint, options.seed, options.num_questions)
        await self.fleet.ready()
        await self.fleet.proven()
        sent_over_http = questions[: max(4, len(questions) // 4)]
        return questions, await make_http_questions(http, sent_over_http, self._rng("http questions"))

    def _start(self, worker_id: str) -> Service:
        """Start a service, or its next life."""
        if not self._lives:
            self._checkpoint = make_checkpoint(self.folder)
        role, _, host = worker_id.partition("-")
        self._lives[worker_id] += 1
        env = {
            "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "protos" / "gen"))),
            SEED: f"{self.options.seed} {worker_id} {self._lives[worker_id]}",
            COUNTS: str(self.counts),
        }
        if worker_id in self.surroundings.clocks:
            env |= self.surroundings.clocks[worker_id].environment
        lease = ("--lease-seconds", str(self.options.lease_seconds))
        flags = ("--host-id", f"host-{host}", *lease, *self._flags(role, host))
        return self.fleet.start(role, worker_id, *flags, env=env, launcher=("tests.chaos.launch",))

    def _flags(self, role: str, host: str) -> Sequence[str]:
        if role == "kv":
            disk = ("--disk-bytes", str(32 << 20), "--disk-dir", str(self.surroundings.kept / f"disk-{host}"))
            return "--arena-bytes", str(16 << 20), "--store-bytes", str(4 << 20), *disk
        model = ("--model", str(self._checkpoint), "--num-threads", "1", "--dtype", "float32")
        chunks = "96" if role == "prefill" else "128"
        watch = ("--engine-timeout-seconds", str(self.options.suspect_seconds))
        staging = ("--kv-staging", "always", "--kv-staging-bytes", str(_STAGING_BYTES)) if host == "a" else ()
        return (
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

    async def _faults_and_clients(
        self, http: httpx.AsyncClient, questions: list[Question], http_questions: list[HttpQuestion]
    ) -> None:
        clients = [
            asyncio.create_task(self._client(number, http, questions, http_questions))
            for number in range(self.options.num_clients)
        ]
        runs = [self.faults.run(self._is_done)]
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
        return is_long_enough and not self.faults.has_more

    async def _client(
        self, client: int, http: httpx.AsyncClient, questions: list[Question], http_questions: list[HttpQuestion]
    ) -> None:
        rng = self._rng(f"client {client}")
        while not self._is_done():
            await asyncio.sleep(rng.random() * self.options.max_think_seconds)
            number = next(self._numbers)
            self._num_sent += 1
            rng = self._rng(f"stream {number}")
            if rng.random() < _HTTP_SHARE:
                await self._send_over_http(http, rng, http_questions)
            else:
                leaves = rng.random() < _LEAVING_SHARE
                record = new_record(rng, f"chaos-{number}", questions, leaves=leaves)
                await ask(self.fleet.gateway.dispatcher, record, rng, self.pauses)
                self.records.append(record)  # a stream that the end of the run cuts off is not recorded

    async def _send_over_http(
        self, http: httpx.AsyncClient, rng: random.Random, questions: Sequence[HttpQuestion]
    ) -> None:
        leave_after = rng.randrange(20) if rng.random() < _LEAVING_SHARE else None
        record = HttpStreamRecord(rng.choice(questions), leave_after=leave_after)
        try:
            await send_over_http(http, record, self.faults.is_disk_broken)
        except httpx.HTTPError as error:
            record.failure = repr(error)
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
