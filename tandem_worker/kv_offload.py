"""What does a worker take from its host's store of KV blocks, and what does it give?

A prompt that comes in is looked up before the engine hears of it; the engine copies what is there as the request leaves
its queue. Blocks that the engine fills are offered to the store in the background. Neither is ever waited for: without
a store, or with one that is slow, the engine computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.log import get_logger
from tandem_runtime.tracing import record_span
from tandem_worker.card import kv_layout
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_regions import EngineRegions
from tandem_worker.kv_link import KvLink, lost_is_unavailable
from tandem_worker.longest_prefix import longest_prefix
from tandem_worker.requests import ActiveRequest

log = get_logger(__name__)

_ASK_SECONDS = 0.25
"""What a store may take to answer: longer, and computing the prompt would often have been faster."""
_ASK_FAR_SECONDS = 2.0
"""The same where another host's store is to be asked too."""
_MAX_UNPUBLISHED_BLOCKS = 4096
_MAX_BLOCKS_PER_CALL = 256
_PUBLIC_TAG = b"public"
"""What all accounts share is counted as if it were an account's of its own; accounts' tags are longer."""
_Hash = TypeVar("_Hash", str, bytes)

COUNTERS = (
    "prompt_cache_asked",
    "prompt_cache_blocks_found",
    "prompt_cache_failures",
    "prompt_cache_blocks_published",
    "prompt_cache_blocks_not_published",
)


@dataclass(frozen=True)
class _Run:
    """Filled blocks in a row, on their way to the store."""

    group: int
    account_tag: bytes
    parent_hash: bytes
    blocks: tuple[kv.StoredBlock, ...]


class PromptCache:
    """One worker's dealings with the store; every method runs on the event loop."""

    def __init__(
        self, engine: EngineLink, link: KvLink, regions: EngineRegions, incarnation: str, *, is_enabled: bool = True
    ) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._engine = engine
        self._link = link
        self._regions = regions
        self._incarnation = incarnation
        self._is_enabled = is_enabled
        self._digest = b""
        self._region_id = ""
        self._bytes_per_block = 0
        self._block_size = 0
        self._windows: dict[int, int] = {}  # by group, how many blocks its window reaches back
        self._lent: set[str] = set()
        self._unpublished: deque[_Run] = deque()
        self._num_unpublished = 0
        self._publishing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def ready(self, ready: messages.Ready) -> None:
        """The engine has loaded: from now on blocks have a form."""
        layout = kv_layout(ready.layout)
        self._digest = layout_digest(layout)
        self._windows = {
            number: -(-(group.window - 1) // group.tokens_per_block)
            for number, group in enumerate(layout.groups)
            if group.window
        }
        self._region_id = ready.region_id
        self._bytes_per_block = ready.layout.bytes_per_block
        self._block_size = ready.layout.tokens_per_block

    # ------------------------------------------------------------------------------------------------- taking

    def add(self, request: ActiveRequest, command: messages.AddRequest) -> None:
        """Send a request to the engine: at once, or with what the store has of its prompt."""
        if not self._can_ask(command):
            self._engine.send(command)
            return
        if not self._is_known(request.submit):
            self._engine.send(command)
            self._record_lookup(request.submit, time.time_ns(), 0)
            return
        task = self._spawn(self._add_with_prefix(request, command))
        request.on_end.append(lambda: self._ended(request, task))

    def admitted(self, request_ids: Iterable[str]) -> None:
        """The engine has taken what it wanted of these requests' prefixes."""
        for request_id in request_ids:
            if request_id in self._lent:
                self._lent.discard(request_id)
                self._spawn(self._give_back(request_id))

    def _ended(self, request: ActiveRequest, task: asyncio.Task[None]) -> None:
        task.cancel()
        self.admitted([request.key])

    def _can_ask(self, command: messages.AddRequest) -> bool:
        """Whether the store could save anything: one token is computed always."""
        has_store = self._is_enabled and bool(self._link.address)
        return has_store and bool(self._useful(command.block_hashes, command)) and command.mode != "decode"

    def _is_known(self, submit: pb.Submit) -> bool:
        """Whether the store may have the first block, without which it lends none; another host's is to be asked."""
        return bool(submit.prefix_source) or self._link.may_have(self._digest, submit.block_hashes[0])

    def _useful(self, block_hashes: Sequence[_Hash], command: messages.AddRequest) -> Sequence[_Hash]:
        """Return those of a request's blocks that may come from the store, and not the last token's."""
        if not self._block_size:
            return ()
        num_useful = (len(command.token_ids) - 1) // self._block_size
        return block_hashes[:num_useful][: command.max_found_blocks]

    async def _add_with_prefix(self, request: ActiveRequest, command: messages.AddRequest) -> None:
        self.counters["prompt_cache_asked"] += 1
        self._lent.add(request.key)  # from now on: a reply that we do not wait for any more may have lent something
        asked_ns = time.time_ns()
        try:
            async with asyncio.timeout(_ASK_FAR_SECONDS if request.submit.prefix_source else _ASK_SECONDS):
                with lost_is_unavailable():
                    prefix = await self._prefix(request, self._useful(request.submit.block_hashes, command))
        except (TandemError, TimeoutError) as error:
            self.counters["prompt_cache_failures"] += 1
            log.info("prompt_cache_silent", request_id=request.submit.request_id, error=str(error) or "no answer")
            prefix = []
        self._engine.send(replace(command, prefix=prefix))
        self._record_lookup(request.submit, asked_ns, len(prefix))

    def _record_lookup(self, submit: pb.Submit, asked_ns: int, num_blocks: int) -> None:
        """Record the only wait for the KV service that a first token has."""
        attributes: dict[str, str | int] = {"tandem.request.id": submit.request_id, "tandem.kv.blocks": num_blocks}
        record_span("kv.lookup", submit.traceparent, asked_ns, time.time_ns(), attributes)

    def preempted(self, request: ActiveRequest, block_hashes: Sequence[str]) -> None:
        """The engine took a request's blocks back; tell it where the store has them, if it has and is not slow."""
        if self._is_enabled and self._link.address:
            task = self._spawn(self._offer(request, [bytes.fromhex(each) for each in block_hashes]))
            request.on_end.append(lambda: self._ended(request, task))

    async def _offer(self, request: ActiveRequest, block_hashes: Sequence[bytes]) -> None:
        self._lent.add(request.key)
        prefix: list[messages.PrefixBlock] = []
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                with lost_is_unavailable():
                    prefix = await self._prefix(request, block_hashes)
        except (TandemError, TimeoutError) as error:
            self.counters["prompt_cache_failures"] += 1
            log.info("prompt_cache_silent", request_id=request.submit.request_id, error=str(error) or "no answer")
        self._lent.add(request.key)  # again: the engine may have admitted the request while the store was asked
        if prefix:
            self._engine.send(messages.OfferPrefix(request.key, prefix))  # what follows says when it is not needed
        else:
            self.admitted([request.key])

    async def _prefix(self, request: ActiveRequest, block_hashes: Sequence[bytes]) -> list[messages.PrefixBlock]:
        def load(group: int, first: int, end: int) -> Awaitable[list[messages.PrefixBlock]]:
            return self._load(request, group, block_hashes[first:end], first)

        found = await longest_prefix(load, len(block_hashes), self._windows)
        await self._regions.map(block.extent.region_id for block in found)
        self.counters["prompt_cache_blocks_found"] += len(found)
        return found

    async def _load(
        self, request: ActiveRequest, group: int, block_hashes: Sequence[bytes], first: int
    ) -> list[messages.PrefixBlock]:
        """Ask for blocks of a group, from `first` on; return the leading ones that can be had."""
        reply = await self._link.client().load(
            kv.LoadRequest(
                layout_digest=self._digest,
                group=group,
                block_hashes=block_hashes,
                reader_id=self._reader_id(request.key),
                reader_incarnation=self._incarnation,
                source_address=request.submit.prefix_source,
                bytes_per_block=self._bytes_per_block,
            )
        )
        return [messages.PrefixBlock(first + block.index, _extent_ref(block), group) for block in reply.blocks]

    async def _give_back(self, request_id: str) -> None:
        try:
            with lost_is_unavailable():
                await self._link.client().unload(self._reader_id(request_id))
        except TandemError as error:  # the lease runs out by itself
            log.debug("prefix_not_given_back", request_id=request_id, error=error.message)

    def _reader_id(self, request_id: str) -> str:
        return f"{self._incarnation}/{request_id}"

    # -------------------------------------------------------------------------------------------------- giving

    def filled(self, request: ActiveRequest, filled: messages.FilledBlocks) -> None:
        """Offer blocks to the store, soon; what it is too slow for is dropped."""
        if not (self._is_enabled and self._link.address):
            return
        if self._num_unpublished + len(filled.slots) > _MAX_UNPUBLISHED_BLOCKS * (1 + len(self._windows)):
            self.counters["prompt_cache_blocks_not_published"] += len(filled.slots)
            return
        self._unpublished += self._runs(request.submit, filled)
        self._num_unpublished += len(filled.slots)
        if self._publishing is None or self._publishing.done():
            self._publishing = self._spawn(self._publish())

    def _runs(self, submit: pb.Submit, filled: messages.FilledBlocks) -> Iterable[_Run]:
        """Cut blocks into what one call takes; public ones count towards no account's quota."""
        blocks = [
            kv.StoredBlock(
                block_hash=bytes.fromhex(block_hash), extent=self._extent(slot, generation), checksum=checksum
            )
            for block_hash, slot, generation, checksum in zip(
                filled.hashes,
                filled.slots,
                filled.generations,
                filled.checksums or [0] * len(filled.slots),
                strict=True,
            )
        ]
        public = frozenset(submit.block_hashes[: submit.num_public_blocks])
        num_public = sum(block.block_hash in public for block in blocks)
        parent = bytes.fromhex(filled.parent)
        for tag, part in ((_PUBLIC_TAG, blocks[:num_public]), (submit.account_tag, blocks[num_public:])):
            for start in range(0, len(part), _MAX_BLOCKS_PER_CALL):
                run = part[start : start + _MAX_BLOCKS_PER_CALL]
                yield _Run(filled.group, tag, parent, tuple(run))
                parent = run[-1].block_hash

    def _extent(self, slot: int, generation: int) -> pb.Extent:
        return pb.Extent(
            kind=pb.MEMORY_KIND_HOST,
            region_id=self._region_id,
            offset=slot * self._bytes_per_block,
            num_bytes=self._bytes_per_block,
            slot=slot,
            generation=generation,
        )

    async def _publish(self) -> None:
        while self._unpublished:
            run = self._unpublished.popleft()
            self._num_unpublished -= len(run.blocks)
            num_stored = await self._publish_run(run)
            self.counters["prompt_cache_blocks_published"] += num_stored

    async def _publish_run(self, run: _Run) -> int:
        try:
            with lost_is_unavailable():
                reply = await self._link.client().publish(
                    kv.PublishRequest(
                        incarnation=self._incarnation,
                        layout_digest=self._digest,
                        group=run.group,
                        blocks=run.blocks,
                        account_tag=run.account_tag,
                        parent_hash=run.parent_hash,
                    )
                )
        except TandemError as error:
            self.counters["prompt_cache_blocks_not_published"] += len(run.blocks)
            log.info("blocks_not_published", num_blocks=len(run.blocks), error=error.message)
            return 0
        return reply.num_stored

    # -------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._regions.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _extent_ref(block: kv.StoredBlock) -> messages.ExtentRef:
    extent = block.extent
    return messages.ExtentRef(
        extent.region_id, extent.offset, extent.num_bytes, extent.slot, extent.generation, block.checksum
    )
