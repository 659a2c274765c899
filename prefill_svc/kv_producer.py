"""Prefill's side of moving KV: seals the blocks of a prompt at the KV service while the engine computes them.

A `KVPublisher` per request reserves the handle, seals each run of blocks that the engine completes, and closes the
handle with the first tokens. The engine keeps the blocks until the handle has ended: see `pinned_blocks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prefill_svc.pinned_blocks import PinnedBlocks
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import HoldRow, TablesReply
from tandem_engine import messages
from tandem_runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, TandemError, Unsupported
from tandem_runtime.kv.client import MAX_BLOCKS_PER_CALL, KvClient
from tandem_runtime.kv.seal_stream import SealStream, seal_request
from tandem_runtime.kv.tables import fill, prompt_bytes
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_link import KvLink, lent_pool, lost_is_unavailable, memory_kind
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, PhaseSpan, RequestTable
from tandem_worker.settings import WorkerSettings

log = get_logger(__name__)


class KVProducer(KVConnector):
    """Publishes the KV blocks of a prefill worker's requests."""

    def __init__(
        self,
        engine: EngineLink,
        link: KvLink,
        regions: EngineRegions,
        requests: RequestTable,
        settings: WorkerSettings,
    ) -> None:
        self._pinned = PinnedBlocks(engine, link, self._handle_ended)
        self._link = link
        self._publishers: dict[str, tuple[KVPublisher, asyncio.Task[None]]] = {}
        self._tasks = TaskSet()
        self._layout = pb.KvLayout()
        self._region = _Region()
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._counters = {"kv_slabs_sealed": 0.0, "kv_seal_failures": 0.0}

    @property
    def kv_address(self) -> str:
        return self._link.address

    def mode(self, submit: pb.Submit) -> messages.Mode:
        if not submit.HasField("handle"):
            raise InvalidRequest("a prefill request needs a KV handle to fill", field="handle")
        return "prefill"

    def on_ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        if not fds:
            raise Unsupported("the engine lends no region of its KV pool, so decode workers cannot read its blocks")
        self._layout = kv_layout(ready.layout)
        most_bytes = ready.max_held_slots * ready.bytes_per_slot
        self._region = _Region(ready.region_id, ready.bytes_per_slot, most_bytes, memory_kind(ready.region_kind))
        self._link.lend(lent_pool(ready, *fds))
        self._pinned.follow(ready.region_id)

    async def wait_ready(self) -> None:
        await self._link.wait_lent()

    def on_reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None:
        publisher = KVPublisher(request, self._layout, self._region)
        self._pinned.add(request, publisher.num_blocks_of)
        task = self._tasks.spawn(self._publish(request, publisher))
        self._publishers[request.key] = publisher, task
        task.add_done_callback(lambda _: self._publishers.pop(request.key, None))

    def on_sealed(self, sealed: messages.SealedBlocks) -> None:
        if found := self._publishers.get(sealed.request_id):
            found[0].add_blocks(sealed)

    def on_output(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        if found := self._publishers.get(request.key):
            found[0].add_first_token(wire)

    def on_imported(self, imported: messages.SlabImported) -> None:
        log.warning("unexpected_slab_import", request_id=imported.request_id)

    def on_end(self, request: ActiveRequest, error: TandemError | None) -> None:
        """Let the publisher of a finished request complete; abort the handle of a failed one, for its readers."""
        if error is not None and self._cancel_publisher(request):
            self._pinned.abort(request, error)

    def _handle_ended(self, request: ActiveRequest) -> None:
        """Publish nothing more: nobody reads it."""
        self._cancel_publisher(request)

    def _cancel_publisher(self, request: ActiveRequest) -> bool:
        _, task = self._publishers.pop(request.key, (None, None))
        return task is not None and task.cancel()

    def spans(self, ledger: pb.PhaseLedger) -> Iterator[PhaseSpan]:
        yield PhaseSpan("prefill.queue", ledger.submitted_ns, ledger.scheduled_ns, {})
        yield PhaseSpan(
            "prefill.compute",
            ledger.scheduled_ns,
            ledger.first_token_ns,
            {
                "tandem.tokens.computed": ledger.num_computed_tokens,
                "tandem.tokens.cached": ledger.num_cached_tokens,
                "gen_ai.usage.input_tokens": ledger.num_prompt_tokens,
            },
        )

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None:
        reply.lease_ms = self._lease_ms
        reply.num_left_out += fill(reply.holds, self._pinned.requests(), self._hold_row, max_rows)

    def _hold_row(self, request: ActiveRequest) -> HoldRow:
        handle = request.submit.handle
        return HoldRow(
            handle_id=handle.handle_id,
            request_id=handle.request_id,
            attempt=handle.attempt,
            holder_incarnation=handle.holder_incarnation,
            num_bytes=prompt_bytes(self._layout, handle.num_tokens),
            deadline_unix_ms=request.deadline_unix_ms,
        )

    async def wait_drained(self) -> None:
        await self._pinned.wait_empty()

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._pinned.close()

    async def _publish(self, request: ActiveRequest, publisher: KVPublisher) -> None:
        """Seal until the handle is closed; without a KV service, release the blocks: decode computes the prompt."""
        try:
            async with asyncio.timeout(max(0.0, request.seconds_left)):
                with lost_is_unavailable():
                    await publisher.run(self._link.client())
            self._counters["kv_slabs_sealed"] += publisher.num_slabs
        except TandemError as error:
            self._publish_failed(request, error)
        except TimeoutError:
            late = DeadlineExceeded("the request's deadline passed before its KV cache was sealed")
            self._publish_failed(request, late)
        except Exception as error:
            log.exception("kv_seal_internal_error", request_id=request.submit.request_id)
            self._publish_failed(request, InternalError(f"prefill could not seal: {error!r}"))

    def _publish_failed(self, request: ActiveRequest, error: TandemError) -> None:
        self._counters["kv_seal_failures"] += 1
        log.warning("kv_seal_failed", request_id=request.submit.request_id, error=error.message)
        self._pinned.abort(request, error)


@dataclass(frozen=True)
class _Region:
    """The region in which others read this worker's blocks."""

    region_id: str = ""
    bytes_per_slot: int = 0
    max_held_bytes: int = 0
    """The most bytes of one prompt that it holds at once; 0: all of them."""
    kind: pb.MemoryKind.ValueType = pb.MEMORY_KIND_HOST


class KVPublisher:
    """Publishes the KV cache of one prompt: turns SealedBlocks and first tokens into Reserve and Seal calls, in order.

    Blocks that complete during a call are sealed together by the next call.
    """

    def __init__(self, request: ActiveRequest, layout: pb.KvLayout, region: _Region) -> None:
        self.num_slabs = 0
        self._request = request
        self._handle = request.submit.handle
        self._layout = layout
        self._region = region
        self._ends: list[int] = []  # by slab: the blocks of all slabs up to its end
        self._num_choices = len(request.submit.choice_seeds) or 1
        self._slabs: list[kv.Slab] = []
        self._num_blocks = 0
        self._has_all_blocks = False
        self._first_tokens: dict[int, kv.FirstToken] = {}
        self._changed = asyncio.Event()

    def add_blocks(self, sealed: messages.SealedBlocks) -> None:
        """Add a run of completed blocks; the last run may be empty."""
        for start in range(0, len(sealed.slots), MAX_BLOCKS_PER_CALL):
            self._slabs.append(self._slab(sealed, start, start + MAX_BLOCKS_PER_CALL))
        self._num_blocks = max(self._num_blocks, sealed.first_block + len(sealed.slots))
        self._has_all_blocks = self._has_all_blocks or sealed.is_last
        self._changed.set()

    def add_first_token(self, output: pb.TokenOutput) -> None:
        token = kv.FirstToken(token_id=output.token_ids[0], finish_reason=output.finish_reason)
        if output.logprobs:
            token.logprobs.CopyFrom(output.logprobs[0])
        self._first_tokens[output.choice_index] = token
        self._changed.set()

    def num_blocks_of(self, num_slabs: int) -> int:
        """Return the blocks of the leading slabs, of all groups."""
        return self._ends[num_slabs - 1] if num_slabs else 0

    async def run(self, client: KvClient) -> None:
        """Reserve the handle, then seal until the handle is closed; raises TandemError if the KV service refuses."""
        region = self._region
        reply = await client.reserve(
            self._handle, region.region_id, self._layout, self._request.seconds_left, region.max_held_bytes
        )
        if region.max_held_bytes and not reply.reports_copied:
            self._check_fits_at_once()
        stream = client.seal_stream()
        try:
            while not await self._seal_next(stream):
                pass
        finally:
            stream.close()

    async def _seal_next(self, stream: SealStream) -> bool:
        """Seal the blocks added since the last call; return True once the handle is closed."""
        await self._changed.wait()
        self._changed.clear()
        slabs = self._next_slabs()
        has_all = self._has_all_blocks and not self._slabs
        is_complete = has_all and len(self._first_tokens) == self._num_choices
        if not slabs and not is_complete:
            return False
        await stream.seal(seal_request(self._handle, slabs, self._closed() if is_complete else None))
        return is_complete

    def _next_slabs(self) -> list[kv.Slab]:
        """Remove and return the slabs of one call; those that it cannot take wait for the next one."""
        totals = accumulate(slab.num_blocks for slab in self._slabs)
        num_slabs = sum(total <= MAX_BLOCKS_PER_CALL for total in totals)
        slabs, self._slabs = self._slabs[:num_slabs], self._slabs[num_slabs:]
        if self._slabs:
            self._changed.set()
        return slabs

    def _closed(self) -> kv.Closed:
        first_tokens = [self._first_tokens[index] for index in range(self._num_choices)]
        return kv.Closed(num_slabs=self.num_slabs, num_blocks=self._num_blocks, first_tokens=first_tokens)

    def _slab(self, sealed: messages.SealedBlocks, start: int, end: int) -> kv.Slab:
        """Return the slab of some blocks of a run, counted from the run's first."""
        group = self._layout.groups[sealed.group]
        size = group.bytes_per_block
        slab = kv.Slab(
            index=self.num_slabs,
            group=sealed.group,
            first_block=sealed.first_block + start,
            num_blocks=len(sealed.slots[start:end]),
            first_layer=group.layers[0],
            num_layers=len(group.layers),
            extents=[
                pb.Extent(
                    kind=self._region.kind,
                    region_id=sealed.region_id,
                    offset=slot * self._region.bytes_per_slot,
                    num_bytes=size,
                    slot=slot,
                    generation=generation,
                )
                for slot, generation in zip(sealed.slots[start:end], sealed.generations[start:end], strict=True)
            ],
            checksums=sealed.checksums[start:end],
        )
        self.num_slabs += 1
        self._ends.append(self.num_blocks_of(len(self._ends)) + slab.num_blocks)
        return slab

    def _check_fits_at_once(self) -> None:
        """Raise Unsupported if the region cannot hold the prompt: without reports, no slot is used again in time."""
        num_bytes = prompt_bytes(self._layout, self._handle.num_tokens)
        if num_bytes > self._region.max_held_bytes:
            raise Unsupported(
                f"the prompt's KV cache has {num_bytes:,} bytes, this worker shows {self._region.max_held_bytes:,} at "
                "once, and the KV service, of release 0.2, does not say what was copied: update it, or raise "
                "--kv-staging-bytes"
            )
