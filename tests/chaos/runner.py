"""What happens in one run: a fleet on two hosts, clients that ask, and a storm over all of them?"""

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

from tests.chaos.asking import ask, new_told
from tests.chaos.co_runners import Neighbours
from tests.chaos.fault_schedule import Storm
from tests.chaos.http_asking import HttpQuestion, HttpTold, ask_over_http, make_http_questions
from tests.chaos.injection import Injector
from tests.chaos.launch import COUNTS, SEED
from tests.chaos.options import Options
from tests.chaos.pauses import Pauses
from tests.chaos.questions import Question, make_checkpoint, make_questions
from tests.chaos.reported import Told
from tests.chaos.verdict import Verdict
from tests.system.fleet import Fleet, Service, until

_HOSTS = ("a", "b")
_ROOT = Path(__file__).parents[2]
_HTTP_SHARE = 0.15
_LEAVING_SHARE = 0.2


class Run:
    """One run; `verdict` says what came of it, also if it was cut short."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.counts = folder / "injected"
        self.fleet = Fleet(
            folder,
            suspect_seconds=options.suspect_seconds,
            gone_seconds=options.gone_seconds,
            request_timeout_seconds=90.0,
            audit_seconds=options.lease_seconds / 2,
        )
        self.pauses = Pauses(self.fleet.registry)
        self.storm = Storm(self.fleet, self._start, self._chance("storm"), options)
        self.neighbours = Neighbours()
        self.told: list[Told] = []
        self.told_over_http: list[HttpTold] = []
        self._lives = Counter[str]()
        self._numbers = count()
        self._num_asked = 0

    async def play(self) -> Verdict:
        """Return what was held and what not."""
        injector = Injector(f"{self.options.seed} control", self.counts)
        with logged_to(self.folder / "control.log"), injector.installed():
            async with self.fleet, httpx.AsyncClient(base_url=self.fleet.base_url, timeout=120) as http:
                questions, http_questions = await self._prepare(http)
                with self.pauses.watching(self.fleet.gateway.dispatcher):
                    broke = await _broke(self._storm_and_clients(http, questions, http_questions))
                await _broke(until(lambda: not self.fleet.gateway.dispatcher.background, 15))
                left = await _broke(self.fleet.pools_are_full(4 * self.options.lease_seconds))
                audit = await self.fleet.gateway.auditor.verdict()
                return Verdict(self, broke, left, audit)

    async def _prepare(self, http: httpx.AsyncClient) -> tuple[list[Question], list[HttpQuestion]]:
        """Start the fleet; meanwhile find out what its answers will be."""
        for host in _HOSTS:
            for role in ("kv", "prefill", "decode"):
                self._start(f"{role}-{host}")
        options = self.options
        questions = await asyncio.to_thread(make_questions, self._checkpoint, options.seed, options.num_questions)
        await self.fleet.ready()
        await self.fleet.proven()
        asked_over_http = questions[: max(4, len(questions) // 4)]
        return questions, await make_http_questions(http, asked_over_http, self._chance("http questions"))

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
        lease = ("--lease-seconds", str(self.options.lease_seconds))
        flags = ("--host-id", f"host-{host}", *lease, *self._flags(role, host))
        return self.fleet.start(role, worker_id, *flags, env=env, launcher=("tests.chaos.launch",))

    def _flags(self, role: str, host: str) -> Sequence[str]:
        if role == "kv":
            disk = ("--disk-bytes", str(32 << 20), "--disk-dir", str(self.folder / f"disk-{host}"))
            return "--arena-bytes", str(16 << 20), "--store-bytes", str(4 << 20), *disk
        model = ("--model", str(self._checkpoint), "--num-threads", "1", "--dtype", "float32")
        chunks = "96" if role == "prefill" else "128"
        return *model, "--num-kv-blocks", "448", "--max-num-seqs", "32", "--max-num-batched-tokens", chunks

    async def _storm_and_clients(
        self, http: httpx.AsyncClient, questions: list[Question], http_questions: list[HttpQuestion]
    ) -> None:
        clients = [
            asyncio.create_task(self._client(number, http, questions, http_questions))
            for number in range(self.options.num_clients)
        ]
        storm = asyncio.create_task(self.storm.rage(self._is_enough))
        watch = asyncio.create_task(self.neighbours.watch())
        try:
            await asyncio.gather(storm, *clients)
        finally:
            for task in (storm, watch, *clients):
                task.cancel()
            await asyncio.gather(storm, watch, *clients, return_exceptions=True)
            await self.storm.end()

    def _is_enough(self) -> bool:
        return self.storm.seconds >= self.options.seconds and self._num_asked >= self.options.num_streams

    async def _client(
        self, client: int, http: httpx.AsyncClient, questions: list[Question], http_questions: list[HttpQuestion]
    ) -> None:
        thoughts = self._chance(f"client {client}")
        while not self._is_enough():
            await asyncio.sleep(thoughts.random() * self.options.longest_thought_seconds)
            number = next(self._numbers)
            self._num_asked += 1
            chance = self._chance(f"stream {number}")
            if chance.random() < _HTTP_SHARE:
                await self._ask_over_http(http, chance, http_questions)
            else:
                leaves = chance.random() < _LEAVING_SHARE
                told = new_told(chance, f"chaos-{number}", questions, leaves=leaves)
                await ask(self.fleet.gateway.dispatcher, told, chance, self.pauses)
                self.told.append(told)  # one that is cut off, because the run is, tells nothing

    async def _ask_over_http(
        self, http: httpx.AsyncClient, chance: random.Random, questions: Sequence[HttpQuestion]
    ) -> None:
        leave_after = chance.randrange(20) if chance.random() < _LEAVING_SHARE else None
        told = HttpTold(chance.choice(questions), leave_after=leave_after)
        try:
            await ask_over_http(http, told)
        except httpx.HTTPError as error:
            told.failure = repr(error)
        self.told_over_http.append(told)

    def _chance(self, of: str) -> random.Random:
        return random.Random(f"{self.options.seed} {of}")


async def _broke(steps: Coroutine[Any, Any, None]) -> str:
    """Return why steps of the run could not be taken; the run goes on to its verdict."""
    try:
        await steps
    except AssertionError as error:
        return str(error)
    return ""


@contextmanager
def logged_to(file: Path) -> Iterator[None]:
    """Send what the control plane, which runs in this process, logs to a file."""
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
