"""Decode's side of moving KV: copies the blocks of a prompt into the engine's pool, then starts decoding at token two.

When the engine has reserved the blocks, a `KVPull` watches the handle. It has each slab copied when the slab is sealed,
while prefill still computes. If the blocks cannot be read, the engine computes the prompt itself. The answer is the
same, since a token is a pure function of its request, but later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from decode_svc.handle_layout import handle_layout
from decode_svc.kv_pull import KVPull, SlabCopier
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import PullRow, TablesReply
from tandem_engine import messages
from tandem_runtime.errors import KvCorrupt, TandemError, Unavailable
from tandem_runtime.kv.tables import fill, prompt_bytes
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet
from tandem_worker.engine_link import EngineLink, EngineRegions
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_link import KvLink, lent_pool, lost_is_unavailable
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, PhaseSpan, RequestTable
from tandem_worker.settings import WorkerSettings

log = get_logger(__name__)


class KVConsumer(KVConnector):
    """Reads the KV blocks of a decode worker's requests."""

    def __init__(
        self,
        engine: EngineLink,
        link: KvLink,
        regions: EngineRegions,
        requests: RequestTable,
        settings: WorkerSettings,
    ) -> None:
        self.copier = SlabCopier(engine, regions, settings.kv_transport)
        self._engine = engine
        self._link = link
        self._requests = requests
        self._layout = pb.KvLayout()
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._pulls: dict[str, tuple[KVPull, asyncio.Task[None]]] = {}
        self._pull_tasks = TaskSet()
        self._release_tasks = TaskSet()
        self._counters = {"kv_pulls": 0.0, "kv_pull_failures": 0.0, "kv_bytes_pulled": 0.0}

    @property
    def kv_address(self) -> str:
        return self._link.address

    def mode(self, submit: pb.Submit) -> messages.Mode:
        """Raises FingerprintMismatch for a handle whose blocks this worker must not read."""
        if not submit.HasField("handle"):
            return "aggregated"
        handle_layout(submit, self._layout)
        return "decode"

    def on_ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        self._layout = kv_layout(ready.layout)
        if fds:  # without a region, the blocks filled here cannot be published
            self._link.lend(lent_pool(ready, *fds))

    async def wait_ready(self) -> None:
        """Return at once: without a KV service, decode computes the prompts itself."""

    def on_reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None:
        if request.submit.HasField("handle"):
            num_cached_tokens = reserved.num_cached_blocks * self._layout.groups[0].tokens_per_block
            layout = handle_layout(request.submit, self._layout)
            pull = KVPull(request, layout, num_cached_tokens, self.copier)
            self._pulls[request.key] = pull, self._pull_tasks.spawn(self._pull(request, pull))

    def on_sealed(self, sealed: messages.SealedBlocks) -> None:
        log.warning("unexpected_seal", request_id=sealed.request_id)

    def on_output(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        """Write into the last ledger how many tokens of a prefilled prompt this worker had to compute."""
        if output.is_last and request.submit.HasField("handle"):
            request.ledger.num_reprefill_tokens = output.num_computed_tokens
            wire.ledger.CopyFrom(request.ledger)

    def on_imported(self, imported: messages.SlabImported) -> None:
        self.copier.on_imported(imported)

    def on_end(self, request: ActiveRequest, error: TandemError | None) -> None:
        self.copier.forget(request)
        pull, task = self._pulls.pop(request.key, (None, None))
        if pull is not None and task is not None and not task.done():
            task.cancel()
            self._release(request, pull, has_failed=True)

    def spans(self, ledger: pb.PhaseLedger) -> Iterator[PhaseSpan]:
        """Return the spans of a finished request; a request without a handle has no transfer."""
        pulled: dict[str, str | int] = {
            "tandem.kv.bytes": ledger.num_bytes_pulled,
            "tandem.kv.transport": ledger.transport,
        }
        yield PhaseSpan("kv.transfer", ledger.transfer_start_ns, ledger.transfer_end_ns, pulled)
        yield PhaseSpan("decode.queue", ledger.transfer_end_ns or ledger.submitted_ns, ledger.scheduled_ns, {})
        yield PhaseSpan("decode.first_token", ledger.scheduled_ns, ledger.first_token_ns, {})
        made: dict[str, str | int] = {
            "gen_ai.usage.output_tokens": ledger.num_generated_tokens,
            "tandem.tokens.drafted": ledger.num_draft_tokens,
            "tandem.tokens.accepted": ledger.num_accepted_tokens,
        }
        yield PhaseSpan("decode.stream", ledger.first_token_ns, ledger.finished_ns, made)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None:
        reply.lease_ms = self._lease_ms
        pulling = [each for each in requests if each.key in self._pulls and not self._pulls[each.key][1].done()]
        reply.num_left_out += fill(reply.pulls, pulling, self._pull_row, max_rows)

    def _pull_row(self, request: ActiveRequest) -> PullRow:
        handle = request.submit.handle
        return PullRow(
            handle_id=handle.handle_id,
            reader_id=request.submit.request_id,
            kv_address=self._link.address,
            num_bytes=prompt_bytes(handle_layout(request.submit, self._layout).layout, handle.num_tokens),
            deadline_unix_ms=request.deadline_unix_ms,
        )

    async def wait_drained(self) -> None:
        await self._release_tasks.join()

    async def close(self) -> None:
        await self._pull_tasks.cancel()
        await self._release_tasks.cancel()

    async def _pull(self, request: ActiveRequest, pull: KVPull) -> None:
        """Pull every block, start decoding and release the lease; on failure, have the engine compute the prompt."""
        self._counters["kv_pulls"] += 1
        has_failed = True
        try:
            with lost_is_unavailable():
                first = await pull.run(self._link.client())
                if first.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    await pull.wait_copied()  # no step follows, so wait for a complete ledger
        except TandemError as error:
            self._failed(request, error)
            self._engine.send(messages.Recompute(request.key))
        except Exception:
            log.exception("kv_pull_internal_error", request_id=request.submit.request_id)
            self._counters["kv_pull_failures"] += 1
            self._engine.send(messages.Recompute(request.key))
        else:
            self._pulls.pop(request.key, None)  # this task has finished: `on_end` must not cancel it
            self._start(request, first)
            has_failed = False
        self._release(request, pull, has_failed=has_failed)

    def _failed(self, request: ActiveRequest, error: TandemError) -> None:
        self._counters["kv_pull_failures"] += 1
        log.warning("kv_pull_failed", request_id=request.submit.request_id, error=error.message)

    def _start(self, request: ActiveRequest, first: kv.FirstToken) -> None:
        """Start decoding at token two, and send token one too: prefill may have died before it sent token one."""
        is_finished = first.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if not is_finished:
            self._engine.send(messages.StartDecode(request.key, [first.token_id]))  # first, since it delays token two
        request.stream.add(_first_output(request, first))
        request.stream.flush(step=0)
        if is_finished:
            self._engine.send(messages.AbortRequest(request.key))
            self._requests.end(request, None)

    def _release(self, request: ActiveRequest, pull: KVPull, *, has_failed: bool) -> None:
        self._release_tasks.spawn(self._release_when_copied(request, pull, has_failed))

    async def _wait_copied(self, request: ActiveRequest, pull: KVPull) -> None:
        """Wait for the engine's copies, twice: a process that slept through the first timeout has answers waiting."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(1.0, request.seconds_left)):
                    await pull.wait_copied()
                    return
        log.error("kv_copy_timed_out", request_id=request.submit.request_id)

    async def _release_when_copied(self, request: ActiveRequest, pull: KVPull, has_failed: bool) -> None:
        """Release our lease of the handle once our engine no longer reads it; other choices may still read."""
        try:
            await self._wait_copied(request, pull)
        except KvCorrupt as error:  # the engine computes those blocks itself
            if not has_failed:
                self._failed(request, error)
        self._counters["kv_bytes_pulled"] += request.ledger.num_bytes_pulled
        submit = request.submit
        try:
            await self._release_handle(submit.handle, submit.request_id, request)
        except Unavailable as error:
            log.info("kv_release_failed", error=error.message)  # the lease expires by itself
        except TandemError as error:
            log.info("kv_release_refused", request_id=submit.request_id, error=error.message)

    async def _release_handle(self, handle: pb.KvHandle, reader_id: str, request: ActiveRequest) -> None:
        """Release a lease through our KV service; at its holder if ours is gone, since a writer may wait for us."""
        try:
            with lost_is_unavailable():
                await self._link.client().release(handle, reader_id, request.seconds_left)
        except Unavailable:
            await self._link.release_at_holder(handle, reader_id, request.seconds_left)


def _first_output(request: ActiveRequest, first: kv.FirstToken) -> pb.TokenOutput:
    submit = request.submit
    output = pb.TokenOutput(
        request_id=submit.request_id,
        attempt=submit.attempt,
        choice_index=submit.choice_index,
        token_ids=[first.token_id],
        position=len(submit.token_ids),
        finish_reason=first.finish_reason,
    )
    if first.HasField("logprobs"):
        output.logprobs.append(first.logprobs)
    if first.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        request.ledger.num_prompt_tokens = submit.num_prompt_tokens
        output.ledger.CopyFrom(request.ledger)
    return output
