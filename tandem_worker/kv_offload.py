"""Reads blocks of a prompt from the KV service's store, and publishes the blocks that the engine fills.

A prompt is looked up before the engine receives it; the engine copies the blocks found when the request leaves the
engine's queue. Blocks that the engine fills are published in the background. Neither waits long for the store: without
an answer in time, the engine computes the prompt itself. What the engine's pool has is reported, for gateways.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import msgspec

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.client import MAX_BLOCKS_PER_CALL
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet
from tandem_runtime.tracing import record_span
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.kv_link import KvLink, lost_is_unavailable
from tandem_worker.model_card import kv_layout
from tandem_worker.pool_reporter import PoolReporter
from tandem_worker.requests import ActiveRequest

log = get_logger(__name__)

_LOOKUP_SECONDS = 0.25
"""The deadline of a lookup without blocks; computing a short prompt is often faster than a slower answer."""
_REMOTE_LOOKUP_SECONDS = 2.0
"""The most for a lookup that includes another host's store; a gateway says how long that is worth waiting for."""
_LOOKUP_SECONDS_PER_BLOCK = 0.0005
"""More for each block: reading one from disk takes about 0.15 ms, computing 16 tokens takes longer than 0.5 ms."""
_MAP_SECONDS = 0.25
"""The deadline for the mapping of a region, which takes a millisecond. It goes on behind the deadline, for others."""
_MAX_LOOKUP_ROUNDS = 3
"""A lookup with window groups ends after as many rounds; each round ends at a gap in a window."""
_MAX_UNPUBLISHED_BLOCKS = 4096
_MAX_BLOCKS_PER_PUBLISH = 256
_MAX_FINISHED = 256
_PUBLIC_TAG = b"public"
"""The tag of blocks that all accounts share. Tags of accounts are longer."""
_Hash = TypeVar("_Hash", str, bytes)

COUNTERS = (
    "prompt_cache_lookups",
    "prompt_cache_blocks_found",
    "prompt_cache_failures",
    "prompt_cache_blocks_published",
    "prompt_cache_blocks_not_published",
)


@dataclass(frozen=True)
class _Whose:
    """For whom blocks are published."""

    account_tag: bytes
    public: frozenset[bytes]
    """The hashes of those that all accounts share."""

    @classmethod
    def of(cls, submit: pb.Submit) -> _Whose:
        return cls(submit.account_tag, frozenset(submit.block_hashes[: submit.num_public_blocks]))


@dataclass(frozen=True)
class _Run:
    """Consecutive filled blocks that are to be published."""

    group: int
    account_tag: bytes
    parent_hash: bytes
    first_block: int
    """In the chain."""
    blocks: tuple[kv.StoredBlock, ...]


class KVOffload:
    """Loads blocks from the store and publishes blocks to it; every method runs on the event loop."""

    def __init__(
        self, engine: EngineLink, link: KvLink, regions: EngineRegions, incarnation: str, *, is_enabled: bool = True
    ) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._engine = engine
        self._link = link
        self._regions = regions
        self._incarnation = incarnation
        self._is_enabled = is_enabled
        self._publishes = is_enabled
        self._digest = b""
        self._bytes_per_slot = 0
        self._is_staged = False
        self._finished: OrderedDict[str, _Whose] = OrderedDict()  # by the engine's request, those that ended last
        self._bytes_per_block = 0
        self._block_size = 0
        self._windows: dict[int, int] = {}  # group -> the number of blocks that its window spans
        self._leased: set[str] = set()  # keys of requests that may have a lease at the store
        self._unpublished: deque[_Run] = deque()
        self._num_unpublished = 0
        self._publishing: asyncio.Task[None] | None = None
        self._tasks = TaskSet()
        self._reporter = PoolReporter(link, incarnation)

    def relay(self, heartbeat: Callable[[], cp.HeartbeatRequest], on_lost: Callable[[], None]) -> None:
        """Send heartbeats with the reports of the pool, see `PoolReporter.relay`."""
        self._reporter.relay(heartbeat, on_lost)

    def on_ready(self, ready: messages.Ready) -> None:
        """Take over the layout and the pool of the loaded engine."""
        layout = kv_layout(ready.layout)
        self._digest = layout_digest(layout)
        self._windows = {
            number: -(-(group.window - 1) // group.tokens_per_block)
            for number, group in enumerate(layout.groups)
            if group.window
        }
        self._bytes_per_slot = ready.bytes_per_slot
        self._is_staged = ready.max_held_slots > 0
        self._publishes = self._is_enabled and ready.region_kind == "host"
        if self._is_enabled and not self._publishes:
            log.info("blocks_never_published", reason="the pool is in device memory, which the store does not read")
        self._bytes_per_block = ready.layout.bytes_per_block
        self._block_size = ready.layout.tokens_per_block
        if ready.tells_points:
            self._reporter.start()

    def on_points(self, points: messages.PoolPoints) -> None:
        """Report what a step has changed in the engine's pool."""
        self._reporter.take(points)

    # ------------------------------------------------------------------------------------------------ loading

    def add(self, request: ActiveRequest, command: messages.AddRequest) -> None:
        """Send a request to the engine: at once, or after a lookup with the blocks that the store lends."""
        if not self._can_look_up(command):
            self._engine.send(command)
            return
        if not self._may_be_stored(request.submit):
            self._engine.send(command)
            self._record_lookup(request.submit, time.time_ns(), 0)
            return
        task = self._tasks.spawn(self._add_with_prefix(request, command))
        request.on_end.append(lambda error: self._on_end(request, task))

    def on_admitted(self, request_ids: Iterable[str]) -> None:
        """Release the leases of requests whose prefixes the engine has copied."""
        for request_id in request_ids:
            if request_id in self._leased:
                self._leased.discard(request_id)
                self._tasks.spawn(self._unload(request_id))

    def _on_end(self, request: ActiveRequest, task: asyncio.Task[None]) -> None:
        task.cancel()
        self.on_admitted([request.key])

    def _can_look_up(self, command: messages.AddRequest) -> bool:
        """Return whether the store could save work; the last token is always computed."""
        has_store = self._is_enabled and bool(self._link.address)
        return has_store and bool(self._useful(command.block_hashes, command)) and command.mode != "decode"

    def _may_be_stored(self, submit: pb.Submit) -> bool:
        """Return whether a store may have the first block; without the first block it lends none."""
        return bool(submit.prefix_source) or self._link.may_have(self._digest, submit.block_hashes[0])

    def _useful(self, block_hashes: Sequence[_Hash], command: messages.AddRequest) -> Sequence[_Hash]:
        """Return the blocks that may come from the store; the block of the last token may not."""
        if not self._block_size:
            return ()
        num_useful = (len(command.token_ids) - 1) // self._block_size
        return block_hashes[:num_useful][: command.max_found_blocks]

    async def _add_with_prefix(self, request: ActiveRequest, command: messages.AddRequest) -> None:
        self.counters["prompt_cache_lookups"] += 1
        self._leased.add(request.key)  # before the call: a reply after our deadline may still have leased blocks
        start_ns = time.time_ns()
        prefix: list[messages.PrefixBlock] = []
        try:
            useful = self._useful(request.submit.block_hashes, command)
            seconds = lookup_seconds(len(useful), request.submit)
            with lost_is_unavailable():
                prefix = await self._load_prefix(request, useful, asyncio.get_running_loop().time() + seconds)
        except (TandemError, TimeoutError) as error:
            self.counters["prompt_cache_failures"] += 1
            reason = str(error) or "no answer"
            log.info("prompt_cache_lookup_failed", request_id=request.submit.request_id, error=reason)
        except Exception:  # our own error in a lookup must not leave the request without an answer
            self.counters["prompt_cache_failures"] += 1
            log.exception("prompt_cache_lookup_failed", request_id=request.submit.request_id)
        self._engine.send(msgspec.structs.replace(command, prefix=prefix))
        self._record_lookup(request.submit, start_ns, len(prefix))

    def _record_lookup(self, submit: pb.Submit, start_ns: int, num_blocks: int) -> None:
        """Record the lookup as a span: the only call to the KV service before a first token."""
        attributes: dict[str, str | int] = {"tandem.request.id": submit.request_id, "tandem.kv.blocks": num_blocks}
        record_span("kv.lookup", submit.traceparent, start_ns, time.time_ns(), attributes)

    async def _load_prefix(
        self, request: ActiveRequest, block_hashes: Sequence[bytes], until: float
    ) -> list[messages.PrefixBlock]:
        def load(group: int, first: int, end: int) -> Awaitable[list[messages.PrefixBlock]]:
            return self._load(request, group, block_hashes[first:end], first, until)

        found = await longest_prefix(load, len(block_hashes), self._windows)
        async with asyncio.timeout(_MAP_SECONDS):
            await self._regions.map(block.extent.region_id for block in found)
        self.counters["prompt_cache_blocks_found"] += len(found)
        return found

    async def _load(
        self, request: ActiveRequest, group: int, block_hashes: Sequence[bytes], first: int, until: float
    ) -> list[messages.PrefixBlock]:
        """Load blocks of a group, numbered from `first` on; return the leading blocks that the store lends.

        What was lent before the time `until` of the loop is kept. Raises TimeoutError if that is nothing.
        """
        found: list[messages.PrefixBlock] = []
        for start in range(0, len(block_hashes), MAX_BLOCKS_PER_CALL):
            run = block_hashes[start : start + MAX_BLOCKS_PER_CALL]
            wanted = kv.LoadRequest(
                layout_digest=self._digest,
                group=group,
                block_hashes=run,
                reader_id=self._reader_id(request.key),
                reader_incarnation=self._incarnation,
                source_address=request.submit.prefix_source,
                source_id=request.submit.prefix_source_id,
                bytes_per_block=self._bytes_per_block,
                first_block=first + start,
                tokens_per_block=self._block_size,
            )
            try:
                async with asyncio.timeout_at(until):
                    reply = await self._link.client().load(wanted)
            except TimeoutError:
                if not found:
                    raise
                self.counters["prompt_cache_failures"] += 1
                log.info("prompt_cache_lookup_cut", request_id=request.submit.request_id, num_blocks=len(found))
                break
            index = first + start
            found += [messages.PrefixBlock(index + block.index, _extent_ref(block), group) for block in reply.blocks]
            if len(reply.blocks) < len(run):
                break
        return found

    async def _unload(self, request_id: str) -> None:
        try:
            with lost_is_unavailable():
                await self._link.client().unload(self._reader_id(request_id))
        except TandemError as error:  # the lease expires by itself
            log.debug("prefix_lease_not_released", request_id=request_id, error=error.message)

    def _reader_id(self, request_id: str) -> str:
        return f"{self._incarnation}/{request_id}"

    # -------------------------------------------------------------------------------------------------- publishing

    def on_finished(self, request: ActiveRequest) -> None:
        """Remember whose blocks a finished request filled, if the engine may still have to copy them out."""
        if self._is_staged:
            self._finished[request.key] = _Whose.of(request.submit)
            if len(self._finished) > _MAX_FINISHED:
                self._finished.popitem(last=False)

    def on_filled(self, request: ActiveRequest | None, filled: messages.FilledBlocks) -> None:
        """Queue filled blocks for publication; blocks beyond the queue's bound are dropped.

        `request` is None if it is over: its blocks count if it finished lately.
        """
        whose = self._finished.get(filled.request_id) if request is None else _Whose.of(request.submit)
        if whose is None:
            return
        if not (self._publishes and self._link.address):
            return
        if self._num_unpublished + len(filled.slots) > _MAX_UNPUBLISHED_BLOCKS * (1 + len(self._windows)):
            self.counters["prompt_cache_blocks_not_published"] += len(filled.slots)
            return
        self._unpublished += self._runs(whose, filled)
        self._num_unpublished += len(filled.slots)
        if self._publishing is None or self._publishing.done():
            self._publishing = self._tasks.spawn(self._publish())

    def _runs(self, whose: _Whose, filled: messages.FilledBlocks) -> Iterable[_Run]:
        """Cut blocks into runs of one call each; public blocks count towards no account's quota."""
        blocks = [
            kv.StoredBlock(
                block_hash=bytes.fromhex(block_hash),
                extent=self._extent(filled.region_id, slot, generation),
                checksum=checksum,
            )
            for block_hash, slot, generation, checksum in zip(
                filled.hashes,
                filled.slots,
                filled.generations,
                filled.checksums or [0] * len(filled.slots),
                strict=True,
            )
        ]
        num_public = sum(block.block_hash in whose.public for block in blocks)
        parent, first = bytes.fromhex(filled.parent), filled.first_block
        for tag, part in ((_PUBLIC_TAG, blocks[:num_public]), (whose.account_tag, blocks[num_public:])):
            for start in range(0, len(part), _MAX_BLOCKS_PER_PUBLISH):
                run = part[start : start + _MAX_BLOCKS_PER_PUBLISH]
                yield _Run(filled.group, tag, parent, first, tuple(run))
                parent, first = run[-1].block_hash, first + len(run)

    def _extent(self, region_id: str, slot: int, generation: int) -> pb.Extent:
        return pb.Extent(
            kind=pb.MEMORY_KIND_HOST,
            region_id=region_id,
            offset=slot * self._bytes_per_slot,
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
                        first_block=run.first_block,
                        tokens_per_block=self._block_size,
                    )
                )
        except TandemError as error:
            self.counters["prompt_cache_blocks_not_published"] += len(run.blocks)
            log.info("blocks_not_published", num_blocks=len(run.blocks), error=error.message)
            return 0
        return reply.num_stored

    # -------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        await self._reporter.close()
        await self._tasks.cancel()
        self._regions.close()


def _extent_ref(block: kv.StoredBlock) -> messages.ExtentRef:
    extent = block.extent
    return messages.ExtentRef(
        extent.region_id, extent.offset, extent.num_bytes, extent.slot, extent.generation, block.checksum
    )


def lookup_seconds(num_blocks: int, submit: pb.Submit) -> float:
    """Return the deadline of a lookup of so many blocks of a request."""
    seconds = _LOOKUP_SECONDS
    if submit.prefix_source:
        worth = submit.prefix_wait_ms / 1000 if submit.HasField("prefix_wait_ms") else _REMOTE_LOOKUP_SECONDS
        seconds = min(_REMOTE_LOOKUP_SECONDS, max(_LOOKUP_SECONDS, worth))
    return seconds + num_blocks * _LOOKUP_SECONDS_PER_BLOCK


LoadBlocks = Callable[[int, int, int], Awaitable[list[messages.PrefixBlock]]]
"""Loads blocks [first, end) of a group; returns the leading blocks that the store lends."""


async def longest_prefix(load: LoadBlocks, num_blocks: int, windows: Mapping[int, int]) -> list[messages.PrefixBlock]:
    """Return the blocks of the longest cached prefix of a prompt of `num_blocks`.

    Group 0 needs all blocks of the prefix. A group in `windows` needs only as many of the last blocks as given there.
    """
    found = await load(0, 0, num_blocks)
    end = len(found)
    for _ in range(_MAX_LOOKUP_ROUNDS if windows else 0):
        if not end:
            break
        firsts = {group: max(0, end - num_needed) for group, num_needed in windows.items() if num_needed}
        parts = await asyncio.gather(*(load(group, first, end) for group, first in firsts.items()))
        reached = min((first + len(part) for first, part in zip(firsts.values(), parts, strict=True)), default=end)
        if reached == end:
            return [*found[:end], *chain.from_iterable(parts)]
        end = reached
    return [] if windows else found
