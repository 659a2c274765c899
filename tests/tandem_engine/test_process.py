"""Tests that a real engine process loads, answers, stops, and dies as its front expects."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

import tandem_engine.client
from tandem_engine.channel import close_all
from tandem_engine.client import EngineClient
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    BlocksSealed,
    EngineFailed,
    ExtentRef,
    LoadProgress,
    MapRegion,
    Ping,
    Pong,
    Ready,
    Refused,
    ReleaseHeld,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

Kind = TypeVar("Kind")
NUM_BLOCKS = 64

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Front:
    """A worker's front: reads events in order until the one it waits for."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._events = client.events()
        self.seen: list[Any] = []
        self.fds: tuple[int, ...] = ()
        self.ready: Ready

    async def wait_for(self, kind: type[Kind], is_it: Callable[[Kind], bool] = lambda event: True) -> Kind:
        """Read up to the first event of a kind; `fds` has the descriptor that came with it."""
        async for event, fds in self._events:
            self.seen.append(event)
            if isinstance(event, kind) and is_it(event):
                if fds:
                    self.fds = fds
                return event
            assert not fds, "only Ready brings a descriptor"
        raise AssertionError(f"the engine ended without {kind.__name__}")

    async def answer(self, request_id: str) -> list[int]:
        """Read up to the last token of a request and return all of them."""
        tokens: list[int] = []
        while True:
            step = await self.wait_for(StepDone)
            for output in (output for output in step.outputs if output.request_id == request_id):
                tokens += output.token_ids
                if output.is_last:
                    return tokens


def _config(folder: Path, **values: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", num_threads=1, num_kv_blocks=NUM_BLOCKS, region_id="tests", **values
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["off", "on"])
async def front(make_checkpoint: Callable[[str], Path], request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    """One engine for all tests that do not change it, and one that overlaps steps: starting one takes seconds."""
    client = await EngineClient.start(_config(make_checkpoint("llama"), overlap=request.param))
    front = Front(client)
    front.ready = await front.wait_for(Ready)
    yield front
    close_all(front.fds)
    await client.stop()
    assert client.returncode == 0


def _request(request_id: str, max_tokens: int) -> AddRequest:
    return AddRequest(request_id, [5, 6, 7, 8], 4, SamplingParams(max_tokens, temperature=0.0))


async def test_a_process_loads_and_streams(front: Front) -> None:
    # 1. It reports progress, then Ready with its pool's descriptor: all blocks, and a generation for each.
    assert any(isinstance(event, LoadProgress) for event in front.seen)
    ready = front.ready
    assert (ready.num_blocks, ready.region_id, ready.model.model_id) == (NUM_BLOCKS, "tests", "tiny-llama")
    (fd,) = front.fds
    assert ready.region_bytes == os.fstat(fd).st_size == ready.generations_offset + 8 * NUM_BLOCKS
    # 2. An answer comes one token per step, and its blocks go back.
    front.client.send(_request("a", 10))
    assert len(await front.answer("a")) == 10
    last = front.seen[-1]
    assert last.stats.num_free_blocks == last.stats.num_total_blocks == NUM_BLOCKS


async def test_an_abort_ends_a_request_and_gives_its_blocks_back(front: Front) -> None:
    front.client.send(_request("a", 500))
    await front.wait_for(StepDone, lambda step: bool(step.outputs))
    front.client.send(AbortRequest("a"))
    after = await front.wait_for(StepDone, lambda step: step.stats.num_running == 0)
    assert after.stats.num_free_blocks == NUM_BLOCKS


async def test_a_request_that_cannot_run_is_refused(front: Front) -> None:
    front.client.send(AddRequest("a", list(range(2, 300)) * 2, 596, SamplingParams(1)))
    refused = await front.wait_for(Refused)
    assert refused.reason == "context"


async def test_sealed_blocks_are_read_through_the_region_of_another_process(front: Front) -> None:
    # 1. A prefill of 20 tokens leaves two blocks, the second partly filled.
    ready, (fd,) = front.ready, front.fds
    prompt = list(range(2, 22))
    front.client.send(AddRequest("a", prompt, len(prompt), SamplingParams(1), mode="prefill"))
    (sealed,) = (await front.wait_for(BlocksSealed)).sealed
    await front.wait_for(StepDone)
    assert sealed.is_last and len(sealed.slots) == 2
    # 2. Their bytes are in the region, under the reported generations.
    regions = MappedRegions()
    regions.map(MapRegion("tests", ready.region_bytes, ready.num_blocks, ready.generations_offset), fd)
    size = ready.layout.bytes_per_block
    extents = [
        ExtentRef("tests", slot * size, size, slot, generation)
        for slot, generation in zip(sealed.slots, sealed.generations, strict=True)
    ]
    assert all(regions.read(extent).any() for extent in extents)
    regions.check_generations(extents)
    # 3. Released, everything is free again.
    front.client.send(ReleaseHeld("a"))
    after = await front.wait_for(StepDone)
    assert after.stats.num_free_blocks == NUM_BLOCKS


async def test_an_engine_answers_whether_it_lives_between_two_steps(front: Front) -> None:
    front.client.send(_request("a", 50))
    front.client.send(Ping())
    await front.wait_for(Pong)
    assert await front.answer("a"), "the answer goes on"
    front.client.send(Ping())
    await front.wait_for(Pong)


async def test_sigterm_and_sigint_are_the_fronts_business(front: Front) -> None:
    os.kill(front.client.pid, signal.SIGTERM)
    os.kill(front.client.pid, signal.SIGINT)
    front.client.send(_request("a", 3))
    assert len(await front.answer("a")) == 3


async def test_a_killed_engine_is_an_event_that_says_so(make_checkpoint: Callable[[str], Path]) -> None:
    front = Front(await EngineClient.start(_config(make_checkpoint("llama"))))
    await front.wait_for(LoadProgress)
    os.kill(front.client.pid, signal.SIGKILL)
    failed = await front.wait_for(EngineFailed)
    assert "SIGKILL" in failed.message and str(front.client.pid) in failed.message
    assert front.client.returncode == -signal.SIGKILL
    await front.client.stop()


async def test_an_unusable_model_is_an_event_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    front = Front(await EngineClient.start(_config(tmp_path)))
    failed = await front.wait_for(EngineFailed)
    assert failed.kind == "unsupported" and "safetensors" in failed.message
    await front.client.stop()


async def test_an_engine_whose_front_is_gone_ends(make_checkpoint: Callable[[str], Path]) -> None:
    client = await EngineClient.start(_config(make_checkpoint("llama")))
    front = Front(client)
    await front.wait_for(Ready)
    close_all(front.fds)
    client._channel.close()  # as when the front's process dies
    assert await client._process.wait() == 0


async def test_a_front_never_imports_torch() -> None:
    heavy = {"torch", "numpy", "tandem_engine.process"}
    script = f"import sys, tandem_engine.client; sys.exit(bool({heavy} & sys.modules.keys()))"
    root = Path(tandem_engine.client.__file__).parent.parent
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=root)
    assert await process.wait() == 0
