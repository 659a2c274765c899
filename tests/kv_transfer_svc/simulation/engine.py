"""An engine whose model is a hash: the real core and scheduler over real shared memory, on virtual time.

An import is copied in two halves with time between them, since the owner may overwrite memory during a memcpy. The code
of tandem_engine.execution.mapped_regions compares the generations after the second half. The same is true of copies
from a private pool to the ring of slots that others read.
"""

from __future__ import annotations

import asyncio
import os
import random
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

from tandem_engine import messages
from tandem_engine.channel import Received
from tandem_engine.core import EngineCore, Ticket
from tandem_engine.encoder.messages import EncoderCommand
from tandem_engine.errors import RegionError
from tandem_engine.execution.mapped_regions import MappedRegions
from tandem_engine.execution.regions import OwnedRegion
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, ImportSlab, MapRegion, ReleaseSlabs
from tandem_engine.publisher import PoolPublisher, Publisher
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler import SchedulerOutput
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.staging import StagedPublisher, max_held_slots
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


@dataclass(frozen=True)
class ComputedStep:
    """A step that was computed as it was launched."""

    sampled: Mapping[str, Sequence[Sampled]]
    is_running: bool = False


class HashRunner:
    """Implements tandem_engine.core.Runner."""

    def __init__(self, region_id: str, truth: Truth, rng: random.Random, num_slots: int | None) -> None:
        """With `num_slots` the pool is private, and others read copies of blocks in a ring of so many slots."""
        self.region_id = region_id
        self.num_slots = num_slots or NUM_BLOCKS
        self.generations_offset = self.num_slots * BLOCK_BYTES
        self.region = OwnedRegion(self.generations_offset + 8 * self.num_slots)
        slots = self.region.bytes_at(0, self.generations_offset).data.cast("B")
        self.slot_generations = self.region.uint64_table(self.generations_offset, self.num_slots)
        self._slots = slots
        self._pool = slots if num_slots is None else memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES))
        self._table = self.slot_generations if num_slots is None else array("Q", bytes(8 * NUM_BLOCKS))
        self.ring = None if num_slots is None else SlowRing(self, rng)
        self._mapped = MappedRegions()
        self._truth = truth
        self._first_halves: dict[ExtentRef, bytes] = {}

    @property
    def generations(self) -> MutableSequence[int]:
        return self._table

    def prepare(self, request: Request) -> bool:
        return True

    @property
    def wake_fd(self) -> int | None:
        return None

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> ComputedStep:
        sampled: dict[str, list[Sampled]] = {}
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
        return ComputedStep(sampled)

    def collect(self, ticket: Ticket) -> Mapping[str, Sequence[Sampled]]:
        assert isinstance(ticket, ComputedStep)
        return ticket.sampled

    def close(self) -> None:
        pass

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

    def read_slot(self, slot: int) -> bytes:
        """Return what others read."""
        return bytes(self._slots[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES])

    def write_slot(self, slot: int, first: int, content: bytes) -> None:
        self._slots[slot * BLOCK_BYTES + first : slot * BLOCK_BYTES + first + len(content)] = content

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


class SlowRing:
    """Implements tandem_engine.staging.SlotMemory: a copy has a first half and, some time later, a second."""

    def __init__(self, runner: HashRunner, rng: random.Random) -> None:
        self.region_id = runner.region_id
        self.num_slots = runner.num_slots
        self.generations = runner.slot_generations
        self._runner = runner
        self._rng = rng
        self._started: deque[tuple[int, int]] = deque()

    def start_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        for block, slot in pairs:
            self._runner.write_slot(slot, 0, self._runner.read_block(block)[: BLOCK_BYTES // 2])
            self._started.append((block, slot))

    def take_copied(self, *, wait: bool = False) -> int:
        num_ended = len(self._started) if wait else self._rng.randint(0, len(self._started))
        for _ in range(num_ended):
            block, slot = self._started.popleft()
            self._runner.write_slot(slot, BLOCK_BYTES // 2, self._runner.read_block(block)[BLOCK_BYTES // 2 :])
        return num_ended

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return []


class SimulatedEngine(EngineLink):
    """The front's link to an engine in the same simulated process."""

    def __init__(
        self, process: Process, region_id: str, rng: random.Random, truth: Truth, num_slots: int | None
    ) -> None:
        self.runner = HashRunner(region_id, truth, rng, num_slots)
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=TOKENS_PER_BLOCK,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCABULARY,
            max_num_batched_tokens=10,
            max_num_seqs=6,
            max_num_waiting=8,
        )
        ring = self.runner.ring
        publisher: Publisher = PoolPublisher(region_id, self.runner.checksums)
        if ring is not None:
            publisher = StagedPublisher(ring, self.runner.generations)
        self.core = EngineCore(config, self.runner, publisher=publisher)
        self.num_released: dict[str, int] = {}
        """By request: the leading blocks that were sealed for it and that nobody reads any more."""
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
        return messages.Ready(
            MODEL,
            LAYOUT,
            NUM_BLOCKS,
            runner.region_id,
            size,
            runner.generations_offset,
            runner.num_slots,
            LAYOUT.bytes_per_block,
            max_held_slots=0 if runner.ring is None else max_held_slots(runner.num_slots),
        )

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
        if isinstance(command, ReleaseSlabs):
            known = self.num_released.get(command.request_id, 0)
            self.num_released[command.request_id] = max(known, command.num_blocks)
        for event in self.core.handle(command, *fds):
            self._emit_sealing(event)
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
