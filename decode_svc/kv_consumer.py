"""How does decode come by a prompt's KV blocks, and go on at token two?

As soon as the engine has reserved the blocks, a `Pull` watches the handle and has each slab copied as it is sealed,
while prefill still computes. If the cache cannot be had, the engine computes the prompt itself: a token is a pure
function of its request, so the answer is the same, only later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from decode_svc.pull import Pull, RegionReader
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import PullRow, TablesReply
from tandem_engine import messages
from tandem_runtime.errors import KvCorrupt, TandemError, Unavailable
from tandem_runtime.kv.tables import fill, prompt_bytes
from tandem_runtime.log import get_logger
from tandem_worker.card import kv_layout
from tandem_worker.engine_link import EngineLink
from tandem_worker.engine_regions import EngineRegions
from tandem_worker.front import WorkerFront
from tandem_worker.kv_link import KvLink, lost_is_unavailable, offer_of
from tandem_worker.requests import ActiveRequest
from tandem_worker.settings import WorkerSettings
from tandem_worker.spans import Phase, PhaseSpans

log = get_logger(__name__)


class DecodeHandOver:
    """Decode's side of the hand-over; implements tandem_worker.front.HandOver."""

    def __init__(self, engine: EngineLink, link: KvLink, regions: EngineRegions, settings: WorkerSettings) -> None:
        self.spans = PhaseSpans(phases)
        self._engine = engine
        self._link = link
        self.reader = RegionReader(engine, regions, settings.kv_transport)
        self._front: WorkerFront | None = None
        self._layout = pb.KvLayout()
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._pulls: dict[str, tuple[Pull, asyncio.Task[None]]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._counters = {"kv_pulls": 0.0, "kv_pull_failures": 0.0, "kv_bytes_pulled": 0.0}

    @property
    def kv_address(self) -> str:
        return self._link.address

    def bind(self, front: WorkerFront) -> None:
        self._front = front

    def mode(self, submit: pb.Submit) -> messages.Mode:
        return "decode" if submit.HasField("handle") else "aggregated"

    def ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        self._layout = kv_layout(ready.layout)
        if fds:  # else blocks that are filled here cannot be offered to the store
            self._link.lend(offer_of(ready, fds[0]))

    async def prepared(self) -> None:
        """Decode can always compute by itself: it waits for no KV service."""

    def reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None:
        if request.submit.HasField("handle"):
            pull = Pull(request, self._layout, reserved.num_cached_blocks, self.reader)
            self._pulls[request.key] = pull, asyncio.create_task(self._pull(request, pull))

    def sealed(self, request: ActiveRequest, sealed: messages.SealedBlocks) -> None:
        log.warning("unexpected_seal", request_id=sealed.request_id)

    def sampled(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        """Note in the last ledger what of a handed-over prompt had to be computed after all."""
        if output.is_last and request.submit.HasField("handle"):
            request.ledger.num_reprefill_tokens = output.num_computed_tokens
            wire.ledger.CopyFrom(request.ledger)

    def imported(self, imported: messages.SlabImported) -> None:
        self.reader.imported(imported)

    def ended(self, request: ActiveRequest, error: TandemError | None) -> None:
        self.reader.forget(request)
        pull, task = self._pulls.pop(request.key, (None, None))
        if pull is not None and task is not None and not task.done():
            task.cancel()
            self._release(request, pull, has_failed=True)

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
            num_bytes=prompt_bytes(self._layout, handle.num_tokens),
            deadline_unix_ms=request.submit.deadline_unix_ms,
        )

    async def drained(self) -> None:
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def close(self) -> None:
        tasks = [*(task for _, task in self._pulls.values()), *self._releases]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, request: ActiveRequest, pull: Pull) -> None:
        """Pull every block, set the request going, give the lease back; or let the engine compute the prompt."""
        self._counters["kv_pulls"] += 1
        has_failed = True
        try:
            with lost_is_unavailable():
                first = await pull.run(self._link.client())
                if first.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    await pull.copied()  # no step to hurry for, and the ledger is to be whole
        except TandemError as error:
            self._failed(request, error)
            self._engine.send(messages.Recompute(request.key))
        except Exception:
            log.exception("kv_pull_broke", request_id=request.submit.request_id)
            self._counters["kv_pull_failures"] += 1
            self._engine.send(messages.Recompute(request.key))
        else:
            self._pulls.pop(request.key, None)  # over: `ended` must not cancel it
            self._start(request, first)
            has_failed = False
        self._release(request, pull, has_failed=has_failed)

    def _failed(self, request: ActiveRequest, error: TandemError) -> None:
        self._counters["kv_pull_failures"] += 1
        log.warning("kv_pull_failed", request_id=request.submit.request_id, error=error.message)

    def _start(self, request: ActiveRequest, first: kv.FirstToken) -> None:
        """Pass token one on, for prefill may have died before it could, and go on at token two."""
        assert self._front is not None, "bound before the first request"
        is_finished = first.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if not is_finished:
            self._engine.send(messages.StartDecode(request.key, [first.token_id]))  # token two is waited for
        self._front.emit(request, _first_output(request, first))
        if is_finished:
            self._engine.send(messages.AbortRequest(request.key))
            self._front.finish(request)

    def _release(self, request: ActiveRequest, pull: Pull, *, has_failed: bool) -> None:
        task = asyncio.create_task(self._give_back(request, pull, has_failed))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _give_back(self, request: ActiveRequest, pull: Pull, has_failed: bool) -> None:
        """Release the handle, which another choice may still read, once our engine has copied what it will."""
        try:
            async with asyncio.timeout(max(1.0, request.seconds_left)):
                await pull.copied()
        except TimeoutError:
            log.error("kv_copy_not_answered", request_id=request.submit.request_id)
        except KvCorrupt as error:  # the engine has noticed, and computes those blocks
            if not has_failed:
                self._failed(request, error)
        self._counters["kv_bytes_pulled"] += request.ledger.num_bytes_pulled
        submit = request.submit
        try:
            with lost_is_unavailable():
                await self._link.client().release(submit.handle, submit.request_id)
        except Unavailable as error:
            log.info("kv_release_not_delivered", error=error.message)  # the lease runs out by itself
        except TandemError as error:
            log.info("kv_release_refused", request_id=submit.request_id, error=error.message)


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


def phases(ledger: pb.PhaseLedger) -> Iterator[Phase]:
    """Split a decode's ledger into its spans; an aggregated request has no transfer."""
    pulled: dict[str, str | int] = {"tandem.kv.bytes": ledger.num_bytes_pulled, "tandem.kv.transport": ledger.transport}
    yield Phase("kv.transfer", ledger.transfer_start_ns, ledger.transfer_end_ns, pulled)
    yield Phase("decode.queue", ledger.transfer_end_ns or ledger.submitted_ns, ledger.scheduled_ns, {})
    yield Phase("decode.first_token", ledger.scheduled_ns, ledger.first_token_ns, {})
    made: dict[str, str | int] = {
        "gen_ai.usage.output_tokens": ledger.num_generated_tokens,
        "tandem.tokens.drafted": ledger.num_draft_tokens,
        "tandem.tokens.accepted": ledger.num_accepted_tokens,
    }
    yield Phase("decode.stream", ledger.first_token_ns, ledger.finished_ns, made)
