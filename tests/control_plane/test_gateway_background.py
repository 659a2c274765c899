"""A gateway outlives its background tasks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import structlog.testing

from control_plane.accounts.service import Accounts
from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from tandem.v1 import types_pb2 as pb
from tests.control_plane.scripted_worker import ScriptedWorker

LOOPS = (
    *("sweep", "catalog", "prober", "auditor", "gateway-heartbeats", "token-uses"),
    *("live", "live-events", "events", "explanations"),
)


@asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[None]:
    """Run the gateway inside the block; at its end it must drain with status 0."""
    drain = asyncio.Event()
    task = asyncio.create_task(gateway.run(drain))
    started = asyncio.create_task(gateway.started.wait())
    await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
    assert started.done(), task
    try:
        yield
        assert not task.done(), task
    finally:
        drain.set()
        assert await asyncio.wait_for(task, 30) == 0


def new_gateway(folder: Path) -> Gateway:
    addresses = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    return Gateway(ControlPlaneSettings(**addresses, state_dir=str(folder)))  # type: ignore[arg-type]


class FailsTwice:
    """A background loop that fails in its first two lives, and then runs until it is cancelled."""

    def __init__(self) -> None:
        self.num_lives = 0
        self.is_well = asyncio.Event()

    async def __call__(self) -> None:
        self.num_lives += 1
        if self.num_lives <= 2:
            raise KeyError("a defect")
        self.is_well.set()
        await asyncio.Event().wait()


async def test_a_gateway_goes_on_while_each_of_its_loops_fails_and_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: dict[str, FailsTwice] = {}
    gateway = new_gateway(tmp_path)
    whole = gateway.background

    def failing(accounts: Accounts) -> dict[str, Callable[[], Awaitable[None]]]:
        loops.update({name: FailsTwice() for name in whole(accounts)})
        return {**loops}

    monkeypatch.setattr(gateway, "background", failing)
    with structlog.testing.capture_logs() as lines:
        async with running(gateway):
            async with asyncio.timeout(30):
                assert set(loops) == set(LOOPS), "these are all"
                await asyncio.gather(*(loop.is_well.wait() for loop in loops.values()))
            async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}") as client:
                assert (await client.get("/healthz")).status_code == 200
    failed = [line["task"] for line in lines if line["event"] == "background_loop_failed"]
    assert sorted(failed) == sorted([*LOOPS, *LOOPS])


async def test_a_worker_with_a_malformed_file_does_not_end_the_gateway(tmp_path: Path) -> None:
    """Finding 6: the gateway was gone after 0.7 s, with JSONDecodeError."""
    content = b"no JSON"
    digest = hashlib.blake2b(content, digest_size=16).digest()

    class Malformed(ScriptedWorker):
        async def GetAsset(self, request: pb.AssetRequest, context: object) -> AsyncIterator[pb.Chunk]:
            yield pb.Chunk(data=content)

    gateway = new_gateway(tmp_path)
    worker = await Malformed("bad").start()
    try:
        async with running(gateway):
            info = worker.info()
            for name in ("tokenizer.json", "tokenizer_config.json"):
                info.card.assets.add(name=name, digest=digest)
            gateway.registry.register(info, worker.load())
            async with asyncio.timeout(30), httpx.AsyncClient(base_url=f"http://{gateway.http_address}") as client:
                while not (rows := (await client.get("/v1/workers")).json()["data"])[0]["load"]["error"]:
                    pass
                assert "tokenizer_config.json" in rows[0]["load"]["error"]
                assert (await client.get("/v1/models")).json()["data"] == []
    finally:
        await worker.kill()


@pytest.mark.parametrize(("seconds", "is_said"), [(None, False), (30.0, True)])
async def test_a_gateway_that_drains_for_less_than_a_request_may_take_says_so_at_its_start(
    tmp_path: Path, seconds: float | None, is_said: bool
) -> None:
    addresses = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    settings = ControlPlaneSettings(**addresses, state_dir=str(tmp_path), drain_seconds=seconds)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as lines:
        async with running(Gateway(settings)):
            pass
    said = [line for line in lines if line["event"] == "drain_shorter_than_requests"]
    assert [(line["drain_seconds"], line["request_timeout_seconds"]) for line in said] == [(30.0, 600.0)] * is_said
    [draining] = [line for line in lines if line["event"] == "draining"]
    assert draining["seconds"] == (600.0 if seconds is None else seconds)
