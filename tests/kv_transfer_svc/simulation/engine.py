"""An engine whose model is a hash: the real core and scheduler over real shared memory, on virtual time.

An import is copied in two halves with time between them, since the owner may overwrite memory during a memcpy. The code
of tandem_engine.execution.mapped_regions compares the generations after the second half.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, MutableSequence, Sequence

from tandem_engine import messages
from tandem_engine.channel import Received
from tandem_engine.core import EngineCore, RegionError
from tandem_engine.encoder.messages import EncoderCommand
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.regions import OwnedRegion
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, ImportSlab, MapRegion
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler import SchedulerOutput
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_worker.engine_link import EngineLink
from tests.kv_transfer_svc.simulation.tokens import (
    BLOCK_BYTES,
    KV_BYTES,
    TOKENS_PER_BLOCK,
    VOCABULARY,
    kv_of,
    token_after,
)
from tests.kv_transfer_svc.simulation.truth import Truth
from tests.kv_transfer_svc.simulation.virtual_loop import Process

NUM_BLOCKS = 36
CONTEXT_LENGTH = 96
LAYOUT = messages.LayoutInfo(2, TOKENS_PER_BLOCK, 1, 1, 1, "float32", "layer,kv,head,token,dim", BLOCK_BYTES)
MODEL = messages.ModelInfo(
    model_id="simulated",
    architecture="Hash",
    num_parameters=1,
    dtype="float32",
    device="cpu",
    vocab_size=VOCABULARY,
    context_length=CONTEXT_LENGTH,
    eos_token_ids=[],
    generation_defaults={},
    chat_template="",
    weights_digest="w",
    quantization="",
    kv_dtype="float32",
    tokenizer_digest="t",
    numerics_class="n",
    asset_paths={},
)


class HashRunner:
    """Implements tandem_engine.core.Runner."""

    def __init__(self, region_id: str, truth: Truth) -> None:
        self.region_id = region_id
        self.generations_offset = NUM_BLOCKS * BLOCK_BYTES
        self.region = OwnedRegion(self.generations_offset + 8 * NUM_BLOCKS)
        self._pool = self.region.bytes_at(0, self.generations_offset).data.cast("B")
        self._table = self.region.uint64_table(self.generations_offset, NUM_BLOCKS)
        self._mapped = MappedRegions()
        self._truth = truth
        self._first_halves: dict[ExtentRef, bytes] = {}

    @property
    def generations(self) -> MutableSequence[int]:
        return self._table

    def prepare(self, request: Request) -> bool:
        return True

    def execute(
        self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None
    ) -> Mapping[str, Sequence[Sampled]]:
        sampled = {}
        for run in output.runs:
            request, end = run.request, run.first_position + run.num_tokens
            right = kv_of(request.token_ids[:end])
            seen = self._read_tokens(request.block_table, run.first_position)
            if seen != right[: len(seen)]:
                self._truth.violated(f"{self.region_id}: {request.request_id} attends to KV that is not its own")
            self._write_tokens(request.block_table, run.first_position, right)
        kv_written()
        for run in output.runs:
            if run.samples:
                request = run.request
                right = kv_of(request.token_ids[: run.first_position + run.num_tokens])
                sampled[request.request_id] = [Sampled(token_after(right)) for _ in request.choice_seeds]
        return sampled

    def copy_first_halves(self, extents: Sequence[ExtentRef]) -> None:
        """Start to copy; errors show when the copy is completed."""
        for extent in extents:
            if extent.region_id in self._mapped._regions:
                self._first_halves[extent] = bytes(self._mapped.read(extent))[: extent.num_bytes // 2]

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        contents = []
        for extent in extents:
            second = bytes(self._mapped.read(extent))
            first = self._first_halves.pop(extent, second[: extent.num_bytes // 2])
            contents.append(first + second[len(first) :])
        self._check_generations(extents)
        for block, extent, content in zip(blocks, extents, contents, strict=True):
            self._truth.accepted(extent, content)
            self._pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content
        return sum(len(content) for content in contents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        raise AssertionError("all engines of the simulation have one layout")

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return []

    def _check_generations(self, extents: Sequence[ExtentRef]) -> None:
        try:
            self._mapped.check_generations(extents)
        except RegionError:
            self._truth.counts["copies overtaken by their owner, and refused"] += 1
            raise

    def map_region(self, command: MapRegion, *fds: int) -> None:
        self._mapped.map(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self._mapped.unmap(region_id)

    def read_block(self, block: int) -> bytes:
        return bytes(self._pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def _read_tokens(self, table: Sequence[int], num_tokens: int) -> bytes:
        num_blocks = -(-num_tokens // TOKENS_PER_BLOCK)
        return b"".join(map(self.read_block, table[:num_blocks]))[: num_tokens * KV_BYTES]

    def _write_tokens(self, table: Sequence[int], first: int, kv: bytes) -> None:
        for position in range(first, len(kv) // KV_BYTES):
            block, index = table[position // TOKENS_PER_BLOCK], position % TOKENS_PER_BLOCK
            offset = block * BLOCK_BYTES + index * KV_BYTES
            self._pool[offset : offset + KV_BYTES] = kv[position * KV_BYTES : (position + 1) * KV_BYTES]


class SimulatedEngine(EngineLink):
    """The front's link to an engine in the same simulated process."""

    def __init__(self, process: Process, region_id: str, rng: random.Random, truth: Truth) -> None:
        self.runner = HashRunner(region_id, truth)
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=TOKENS_PER_BLOCK,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCABULARY,
            max_num_batched_tokens=10,
            max_num_seqs=6,
            max_num_waiting=8,
        )
        self.core = EngineCore(config, self.runner)
        self.on_sealed: Callable[[messages.SealedBlocks], None] = lambda sealed: None
        self._rng = rng
        self._commands: deque[tuple[messages.Command, tuple[int, ...]]] = deque()
        self._woken = asyncio.Event()
        self._events: asyncio.Queue[Received] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def pid(self) -> int:
        return 0

    def send(self, command: messages.Command | EncoderCommand, *fds: int) -> None:
        assert not isinstance(command, EncoderCommand), "no encode worker is simulated"
        self._commands.append((command, tuple(map(os.dup, fds))))
        self._woken.set()

    async def events(self) -> AsyncIterator[Received]:
        while True:
            yield await self._events.get()

    async def stop(self) -> None:
        self._task.cancel()

    def _ready(self) -> messages.Ready:
        runner = self.runner
        size = runner.region.num_bytes
        return messages.Ready(MODEL, LAYOUT, NUM_BLOCKS, runner.region_id, size, runner.generations_offset)

    async def _run(self) -> None:
        self._emit(self._ready(), (os.dup(self.runner.region.fd),))
        while True:
            while self._commands:
                await self._handle(*self._commands.popleft())
            if self.core.has_work():
                await self._step()
            elif not self._commands:
                self._woken.clear()
                await self._woken.wait()

    async def _handle(self, command: messages.Command, fds: tuple[int, ...]) -> None:
        if isinstance(command, ImportSlab):
            self.runner.copy_first_halves(command.extents)
            await self._copy_delay()
        for event in self.core.handle(command, *fds):
            self._emit(event)
        for fd in fds:
            os.close(fd)

    async def _step(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.002, 0.03))
        self._emit_sealing(self.core.step(self._emit_sealing))

    def _emit_sealing(self, event: messages.EngineEvent) -> None:
        if isinstance(event, messages.BlocksSealed | messages.StepDone):
            for sealed in event.sealed:
                self.on_sealed(sealed)
        self._emit(event)

    async def _copy_delay(self) -> None:
        """Sleep: usually shortly, sometimes long enough for the owner to reuse the block."""
        seconds = 0.0005 if self._rng.random() < 0.75 else self._rng.uniform(0.01, 0.6)
        await asyncio.sleep(seconds)

    def _emit(self, event: messages.EngineEvent, fds: tuple[int, ...] = ()) -> None:
        self._events.put_nowait(Received(event, fds))
