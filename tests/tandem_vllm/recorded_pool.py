"""vLLM's block pool, scheduler and memory as recordings show them, for tests without vLLM."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tandem_engine.errors import RegionError
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, FilledBlocks, MapRegion, RequestFailed, SealedBlocks
from tandem_engine.publisher import PoolPublisher
from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.request import Request, Sampled
from tandem_vllm.arrivals import Arrivals
from tandem_vllm.core import EngineStep, Pool, Run
from tandem_vllm.hand_over import Exchange
from tandem_vllm.keys import pool_key

SIZE = 4
NUM_BLOCKS = 8


class RecordedBlocks:
    """Implements `tandem_vllm.blocks.Blocks`: unhashed blocks are reused first, hashed ones last, as in vLLM."""

    def __init__(self) -> None:
        self.generations = [0] * (1 + NUM_BLOCKS)
        self.references: Counter[int] = Counter()
        self._free = OrderedDict.fromkeys(range(1, 1 + NUM_BLOCKS))
        self._key_of: dict[int, BlockHash] = {}

    @property
    def num_available(self) -> int:
        return len(self._free)

    def find(self, keys: Iterable[BlockHash]) -> list[int]:
        blocks = {key: block for block, key in self._key_of.items()}
        found: list[int] = []
        for key in keys:
            if key not in blocks:
                break
            found.append(blocks[key])
        return found

    def take(self, num_blocks: int) -> list[int]:
        if num_blocks > self.num_available:
            raise ValueError(f"{num_blocks} blocks of {self.num_available}")
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in taken:
            self._key_of.pop(block, None)
            self.generations[block] += 1
            self.references[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self.references[block] += 1

    def let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} was let go twice"
            if not self.references[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key_of)

    def num_references(self, block: int) -> int:
        return self.references[block]

    def register(self, blocks: Sequence[int], keys: Sequence[BlockHash]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self._key_of.setdefault(block, key)


class RecordedMemory:
    """Implements `tandem_vllm.blocks.Memory`: a block's content is a word, an extent's the name of its slot."""

    def __init__(self) -> None:
        self.content: dict[int, str] = {}
        self.gone: set[int] = set()
        """Slots that were used again."""

    def map_region(self, command: MapRegion, *fds: int) -> None: ...

    def unmap_region(self, region_id: str) -> None: ...

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        for block, extent in zip(blocks, extents, strict=True):
            self.content[block] = f"slot {extent.slot}"
        if gone := [extent.slot for extent in extents if extent.slot in self.gone]:
            raise RegionError(f"slot {gone[0]} was used again")
        return sum(extent.num_bytes for extent in extents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        for of_extent, extent in zip(parts, extents, strict=True):
            for part in of_extent:
                self.content[part.block] = f"slot {extent.slot}"
        return sum(extent.num_bytes for extent in extents)

    def read(self, block: int) -> Any:
        return self.content[block]

    def write(self, block: int, content: Any) -> None:
        self.content[block] = content


class RecordedScheduler:
    """Implements `tandem_vllm.core.Engine`: one chunk of one request in each step, in the order of vLLM's calls."""

    def __init__(self, blocks: RecordedBlocks, memory: RecordedMemory, chunk: int = 100) -> None:
        self.blocks = blocks
        self.arrivals = Arrivals(blocks, memory, SIZE)
        self.waiting: list[Request] = []
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.num_tokens: dict[str, int] = {}
        """vLLM has its own copy of a request's tokens."""
        self.running: list[Request] = []
        self.num_aborted = 0
        self.num_preempted = 0
        self.failing: set[str] = set()
        self._chunk = chunk
        self._answer = 50

    def prepare(self, request: Request) -> bool:
        return True

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.num_tokens[request.request_id] = request.num_tokens

    def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        self.waiting = [each for each in self.waiting if each.request_id != request_id]
        self.running = [each for each in self.running if each.request_id != request_id]
        self.blocks.let_go(self.tables.pop(request_id, []))
        self.computed.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def pool(self) -> Pool:
        num_used = NUM_BLOCKS - self.blocks.num_available
        return Pool(NUM_BLOCKS, self.blocks.num_available, 0, num_used)

    def step(self) -> EngineStep:
        self._admit()
        if not self.running:
            return EngineStep()
        request = self.running.pop(0)
        name, first = request.request_id, self.computed[request.request_id]
        end = min(self.num_tokens[name], first + self._chunk)
        table = self.tables[name]
        table += self.blocks.take(-(-end // SIZE) - len(table))
        full = end // SIZE
        self.blocks.register(table[:full], [pool_key(request, index, SIZE) for index in range(full)])
        self.computed[name] = end
        self.running.append(request)
        runs = [Run(name, first, end - first, tuple(table))]
        if end < self.num_tokens[name]:
            return EngineStep(runs)
        if name in self.failing:
            return EngineStep(runs, {}, [RequestFailed(name, "its logits are no numbers")])
        self._answer += 1
        self.num_tokens[name] += 1
        choices = {}
        if request.mode == "prefill":
            self.abort(name)  # it ends with its first token
            if len(request.choice_seeds) > 1:
                choices = {name: [Sampled(self._answer + index) for index in range(len(request.choice_seeds))]}
        return EngineStep(runs, {name: Sampled(self._answer)}, choices=choices)

    def _admit(self) -> None:
        """Admit the first request that fits to its end; one that does not fit is not overtaken."""
        for request in sorted(self.waiting, key=lambda each: each.rank):
            name = request.request_id
            num_full = (request.num_tokens - 1) // SIZE
            found = self.blocks.find(pool_key(request, index, SIZE) for index in range(num_full))
            num_found = len(found) * SIZE
            external = self.arrivals.num_matched_tokens(name, num_found, request.num_tokens)
            if external is None:
                continue
            num_unused = sum(not self.blocks.references[block] for block in found)
            if -(-request.num_tokens // SIZE) - len(found) + num_unused > self.blocks.num_available:
                return
            self.waiting.remove(request)
            self.blocks.hold(found)
            end = num_found + external
            self.tables[name] = [*found, *self.blocks.take(-(-(end + 1) // SIZE) - len(found))]
            self.arrivals.placed(name, self.tables[name], external)
            self.computed[name] = end
            self.running.append(request)
            return


class KeepingPublisher(PoolPublisher):
    """The pool as a region, and all that was announced."""

    def __init__(self) -> None:
        super().__init__("region", lambda slots: [])
        self.sealed: list[SealedBlocks] = []
        self.filled: list[FilledBlocks] = []
        self.forgotten: list[str] = []

    def publish(self, sealed: Sequence[SealedBlocks], filled: Sequence[FilledBlocks]) -> None:
        self.sealed += sealed
        self.filled += filled
        super().publish(sealed, filled)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        super().forget(request_id)


def exchange_of(scheduler: RecordedScheduler, memory: RecordedMemory, publisher: KeepingPublisher) -> Exchange:
    return Exchange(scheduler.blocks, memory, publisher, scheduler.arrivals)
