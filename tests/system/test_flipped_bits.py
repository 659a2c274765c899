"""A flipped bit never becomes a wrong token, wherever KV is stored or sent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from tests.system.bit_flips import BadWire, engine_pid, flip_files, flip_memory
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 8
BLOCK = 16
STORE_BYTES = 1 << 20


@dataclass(frozen=True)
class World:
    """host-a with two prefill workers and a decode worker, host-b with a decode worker; all verify what they copy."""

    fleet: Fleet
    model: Path
    wire: BadWire
    kv_flags: tuple[str, ...]

    async def ask(
        self, prompt: list[int], prefill: str, decode: str = "decode-a", *, cacheable: bool = True
    ) -> RequestStream:
        stream = await self.begin(prompt, prefill, decode, cacheable=cacheable)
        return await self.end(stream, prompt)

    async def begin(self, prompt: list[int], prefill: str, decode: str, *, cacheable: bool) -> RequestStream:
        request = token_request("tiny-llama", prompt, NUM_TOKENS, cacheable=cacheable)
        return await self.fleet.dispatcher(decode, prefill).submit(request)

    async def end(self, stream: RequestStream, prompt: list[int]) -> RequestStream:
        async for _ in stream:
            pass
        assert stream.state.choices[0].tokens == greedy(self.model, prompt, NUM_TOKENS)
        return stream

    async def counter(self, worker_id: str, name: str) -> float:
        counters = dict((await self.fleet.stats(worker_id)).counters)
        return counters[name]

    async def rises(self, worker_id: str, name: str, above: float = 0) -> None:
        async def is_above() -> bool:
            return await self.counter(worker_id, name) > above

        await until(is_above, 20, lambda: self.fleet.tails((worker_id,)))

    async def bytes_per_block(self) -> int:
        return (await self.fleet.stats("prefill-a")).kv.bytes_per_block


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process stand still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("flipped-bits")
    model = checkpoint("llama")
    flags = ("--model", str(model), *SMALL, "--verify-kv")
    async with BadWire().open() as wire, Fleet(folder, gone_seconds=30.0) as fleet:
        data = ("--data-listen", f"127.0.0.1:{wire.target_port}", "--data-advertise", wire.address)
        disk = ("--store-bytes", str(STORE_BYTES), "--disk-bytes", str(64 << 20), "--disk-dir", str(folder / "disk"))
        kv_flags = ("--verify-kv", *data, *disk)
        fleet.start("kv", "kv-a", *kv_flags)
        fleet.start("kv", "kv-b", "--host-id", "host-b")
        fleet.start("prefill", "prefill-a", *flags)
        fleet.start("prefill", "prefill-b", *flags)
        fleet.start("decode", "decode-a", *flags)
        fleet.start("decode", "decode-b", "--host-id", "host-b", *flags)
        await fleet.ready()
        yield World(fleet, model, wire, kv_flags)


async def test_on_the_wire_between_hosts(world: World) -> None:
    prompt = clear_prompt(world.model, 130, NUM_TOKENS)
    stream = await world.ask(prompt, "prefill-a", "decode-b", cacheable=False)
    assert stream.state.choices[0].ledger is not None and stream.state.choices[0].ledger.transport == "tcp"
    world.wire.is_bad = True
    try:
        stream = await world.ask(prompt, "prefill-a", "decode-b", cacheable=False)
    finally:
        world.wire.is_bad = False
    ledger = stream.state.choices[0].ledger
    assert ledger is not None
    assert (ledger.transport, ledger.num_computed_tokens) == ("grpc", 0), "read again by the way that always works"
    assert 1 <= await world.counter("kv-b", "checksum_failures") <= world.wire.num_flipped, "of reads on their way"


async def test_in_shared_memory_between_prefill_and_decode(world: World) -> None:
    prompt, fleet = clear_prompt(world.model, 150, NUM_TOKENS), world.fleet
    prefill, decode = (engine_pid(fleet.services[name].process.pid) for name in ("prefill-a", "decode-a"))
    sealed = await world.counter("kv-a", "handles_sealed")
    # 1. Decode's engine stands still while prefill computes and seals the prompt.
    with stopped(decode):
        submitting = asyncio.ensure_future(world.begin(prompt, "prefill-a", "decode-a", cacheable=False))
        await world.rises("kv-a", "handles_sealed", sealed)
        # 2. One bit in each block that prefill has sealed.
        flip_memory(prefill, "tandem-kv", await world.bytes_per_block(), 256 * await world.bytes_per_block())
    # 3. Decode notices, and computes the prompt itself.
    stream = await world.end(await submitting, prompt)
    ledger = stream.state.choices[0].ledger
    assert ledger is not None
    assert ledger.num_computed_tokens >= 149
    assert await world.counter("decode-a", "blocks_corrupt") > 0
    await fleet.pools_are_full()


async def test_in_the_memory_of_the_store(world: World) -> None:
    prompt, fleet = clear_prompt(world.model, 170, NUM_TOKENS), world.fleet
    await world.ask(prompt, "prefill-a")

    async def is_stored() -> bool:
        return (await fleet.stats("kv-a")).kv_service.store.num_blocks >= 170 // BLOCK

    await until(is_stored, 20)
    flip_memory(fleet.services["kv-a"].process.pid, "tandem-kv-blocks", 4096, STORE_BYTES)
    stream = await world.ask(prompt, "prefill-b")
    assert (stream.usage.num_cached_tokens, stream.usage.num_computed_tokens) == (0, 170)
    assert await world.counter("kv-a", "store_memory_corrupt") == 1, "the chain's first; the others are not looked at"


async def test_on_disk(world: World) -> None:
    fleet, prompts = world.fleet, [clear_prompt(world.model, 90, NUM_TOKENS, 1000 * n) for n in range(1, 26)]

    async def is_settled() -> bool:
        store = (await fleet.stats("kv-a")).kv_service.store
        return store.filling_bytes == 0 and store.free_bytes >= STORE_BYTES // 16

    # 1. More than the store's memory holds: the first prompts' blocks go to disk.
    for prompt in prompts:
        await world.ask(prompt, "prefill-a")
        await until(is_settled, 20)
    assert (await fleet.stats("kv-a")).kv_service.store.num_disk_blocks >= 20
    # 2. The service restarts; its memory is empty, its disk is not, and every block there has a flipped bit.
    fleet.services["kv-a"].kill(signal.SIGTERM)
    await fleet.ended(fleet.services.pop("kv-a"))
    assert flip_files(Path(world.kv_flags[-1]), 8192) > 20
    fleet.start("kv", "kv-a", *world.kv_flags)
    await fleet.ready()
    assert (await fleet.stats("kv-a")).kv_service.store.num_disk_blocks > 0

    async def is_found_by_the_workers() -> bool:
        return (await world.ask(prompts[-1], "prefill-b")).state.prefill_ledger is not None

    await until(is_found_by_the_workers, 20)
    # 3. None of them is served.
    for prompt in prompts[:5]:
        stream = await world.ask(prompt, "prefill-b")
        assert stream.state.prefill_ledger is not None
        assert stream.state.prefill_ledger.num_cached_tokens == 0
    assert await world.counter("kv-a", "disk_corrupt") > 0
