"""Compares, once nobody asks any more, what gateways and workers have counted of each other.

streams      each worker has one Attach stream of each living gateway, and of no other
grants       nothing that was granted is outstanding: of a grant that is not used, nothing is left after some seconds
submits      a decode worker has got as many requests and tokens under its grants as the gateway has sent
gateways     nothing waits or runs; nothing counts as sent and not answered
handles      KV services keep none
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx

from control_plane.admission.attachment import Attachment
from control_plane.audit.snapshot import AuditedService
from control_plane.audit.table_reader import TableReader
from control_plane.gateway import Gateway
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tests.chaos.http_gateway import HttpGateway
from tests.chaos.ledger_books import LedgerBooks
from tests.system.fleet import Fleet

_POLL_SECONDS = 0.5
_WITH_STREAMS = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
_IDLE_METRICS = (
    "tandem_admission_waiting",
    "tandem_kv_orphan_bytes",
    "tandem_queue_length",
    "tandem_requests_running",
    "tandem_text_waiting",
)


async def differences(fleet: Fleet, second: HttpGateway, books: LedgerBooks, seconds: float) -> list[str]:
    """Return what does not balance, after `seconds` at most: grants expire, and dead gateways are forgotten."""
    deadline = time.monotonic() + seconds
    while True:
        found = await _all(fleet, second, books)
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_SECONDS)


async def _all(fleet: Fleet, second: HttpGateway, books: LedgerBooks) -> list[str]:
    found = [f"gateway-a: {each}" for each in _of_first(fleet.gateway)]
    try:
        found += [f"{second.name}: {each}" for each in _of_metrics((await second.http.get("/metrics")).text)]
        living = {f"gateway-{incarnation}" for incarnation in await books.living()}
    except (httpx.TransportError, Unavailable) as error:
        return [*found, repr(error)]
    if len(living) != 2:
        found.append(f"gateways by the database: {sorted(living)}")
    return found + await _of_workers(fleet, living)


def _of_first(gateway: Gateway) -> Iterator[str]:
    dispatcher, encoders = gateway.dispatcher, gateway._encoders
    if dispatcher.num_requests or encoders.num_requests:
        yield f"{dispatcher.num_requests} requests run, {encoders.num_requests} at encode workers"
    for model_id, line in [*dispatcher.queue._rooms.items(), *encoders.queue._rooms.items()]:
        waiting = [account for each in line.counters.values() for account in each._num_waiting]
        if len(line) or line._looking or waiting:
            yield f"{model_id}: {len(line)} wait, {len(line._looking)} look, {waiting} count as waiting"
    if encoders._tokens or encoders._let_in:
        yield f"sent to encode workers: {encoders._tokens}; let in and not sent: {len(encoders._let_in)}"
    for worker in gateway.registry.workers():
        room = dispatcher.rooms.rooms.get(worker.incarnation)
        if room is not None and (room.pending or room.num_requests or room.num_tokens):
            yield f"sent to {worker.worker_id} and not answered: {room}"


def _of_metrics(text: str) -> Iterator[str]:
    samples = [line for line in text.splitlines() if line.startswith(_IDLE_METRICS)]
    for sample in samples:
        if float(sample.rpartition(" ")[2]):
            yield sample


async def _of_workers(fleet: Fleet, living: set[str]) -> list[str]:
    reader = TableReader(fleet.gateway._links, fleet.gateway._block_events, member=fleet.gateway.member)
    try:
        answered, silent = await reader.read(fleet.registry.workers())
    finally:
        await reader.close()
    found = [f"{worker}: {problem}" for worker, problem in silent.items()]
    ours = f"gateway-{fleet.gateway._incarnation}"
    for service in answered:
        name = service.worker.info.settings["worker_id"]
        found += [f"{name}: {row}" for row in service.tables.handles]
        if service.worker.role in _WITH_STREAMS:
            attachment = fleet.gateway._links.attachment(service.worker.incarnation)
            found += [f"{name}: {each}" for each in _of_worker(service, living, ours, attachment)]
    return found


def _of_worker(service: AuditedService, living: set[str], ours: str, attachment: Attachment | None) -> Iterator[str]:
    rows = service.tables.attachments
    names = sorted(row.gateway_id for row in rows)
    if names != sorted(living):
        yield f"streams of {names}, alive are {sorted(living)}"
    if service.tables.requests:
        yield f"{len(service.tables.requests)} requests"
    for row in rows:
        if row.num_requests_granted or row.num_tokens_granted:
            yield f"granted and not used: {row}"
        sent = (0, 0) if attachment is None else (attachment.num_requests, attachment.num_tokens)
        has_grants = service.worker.role == pb.WORKER_ROLE_DECODE and row.gateway_id == ours
        if has_grants and (row.num_requests_submitted, row.num_tokens_submitted) != sent:
            yield f"got {row}, sent were {sent[0]} requests and {sent[1]} tokens"
