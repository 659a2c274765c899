"""What becomes of a prompt's KV blocks once prefill has computed them?

A request's `Sealer` reserves its handle, seals each run of blocks as the engine completes it, and closes the handle
with the first tokens. The engine holds the blocks until the KV service says that the handle has ended; `Holds` keeps
book of that, and gives them back by itself if the KV service is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from prefill_svc.kv_publisher import Sealer
from prefill_svc.pinned_blocks import Holds
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import HoldRow, TablesReply
from tandem_engine import messages
from tandem_runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, TandemError, Unsupported
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


class PrefillHandOver:
    """Prefill's side of the hand-over; implements tandem_worker.front.HandOver."""

    def __init__(self, engine: EngineLink, link: KvLink, regions: EngineRegions, settings: WorkerSettings) -> None:
        self.spans = PhaseSpans(phases)
        self._link = link
        self._holds = Holds(engine, link)
        self._sealers: dict[str, Sealer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._layout = pb.KvLayout()
        self._region_id = ""
        self._lease_ms = int(settings.lease_seconds * 1000)
        self._counters = {"kv_slabs_sealed": 0.0, "kv_seal_failures": 0.0}

    @property
    def kv_address(self) -> str:
        return self._link.address

    def bind(self, front: WorkerFront) -> None:
        """Nothing of the front's is needed here."""

    def mode(self, submit: pb.Submit) -> messages.Mode:
        if not submit.HasField("handle"):
            raise InvalidRequest("a prefill request needs a KV handle to fill", field="handle")
        return "prefill"

    def ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        if not fds:
            raise Unsupported("the engine lends no region of its KV pool, so prefill cannot hand its blocks over")
        self._layout, self._region_id = kv_layout(ready.layout), ready.region_id
        self._link.lend(offer_of(ready, fds[0]))
        self._holds.follow(ready.region_id)

    async def prepared(self) -> None:
        await self._link.wait_lent()

    def reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None:
        handle = request.submit.handle
        sealer = Sealer(handle, self._layout, self._region_id, len(request.submit.choice_seeds) or 1)
        self._sealers[request.key] = sealer
        self._holds.add(handle, request.key)
        sealer.task = asyncio.create_task(self._seal(request, sealer))
        self._tasks.add(sealer.task)
        sealer.task.add_done_callback(self._tasks.discard)

    def sealed(self, request: ActiveRequest, sealed: messages.SealedBlocks) -> None:
        if sealer := self._sealers.get(request.key):
            sealer.blocks(sealed)

    def sampled(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        if sealer := self._sealers.get(request.key):
            sealer.first_token(wire)

    def imported(self, imported: messages.SlabImported) -> None:
        log.warning("unexpected_import", request_id=imported.request_id)

    def ended(self, request: ActiveRequest, error: TandemError | None) -> None:
        """A request that ended well is sealed to its end; one that broke is aborted, for its reader to know at once."""
        sealer = self._sealers.pop(request.key, None)
        if sealer is None or error is None:
            return
        assert sealer.task is not None, "set as the sealer was made"
        sealer.task.cancel()
        self._holds.abort(request.submit.handle, error)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None:
        reply.lease_ms = self._lease_ms
        reply.num_left_out += fill(reply.holds, self._holds.handles(), self._hold_row, max_rows)

    def _hold_row(self, handle: pb.KvHandle) -> HoldRow:
        return HoldRow(
            handle_id=handle.handle_id,
            request_id=handle.request_id,
            attempt=handle.attempt,
            holder_incarnation=handle.holder_incarnation,
            num_bytes=prompt_bytes(self._layout, handle.num_tokens),
            deadline_unix_ms=handle.deadline_unix_ms,
        )

    async def drained(self) -> None:
        await self._holds.wait_empty()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._holds.close()

    async def _seal(self, request: ActiveRequest, sealer: Sealer) -> None:
        """Seal until the handle is closed; without a KV service the blocks go back, and decode computes by itself."""
        try:
            async with asyncio.timeout(max(0.0, request.seconds_left)):
                with lost_is_unavailable():
                    await sealer.run(self._link.client())
            self._counters["kv_slabs_sealed"] += sealer.num_slabs
        except TandemError as error:
            self._seal_failed(request, error)
        except TimeoutError:
            self._seal_failed(request, DeadlineExceeded("the request's deadline passed before its KV cache was sealed"))
        except Exception as error:
            log.exception("kv_seal_broke", request_id=request.submit.request_id)
            self._seal_failed(request, InternalError(f"prefill could not seal: {error!r}"))

    def _seal_failed(self, request: ActiveRequest, error: TandemError) -> None:
        self._counters["kv_seal_failures"] += 1
        log.warning("kv_seal_failed", request_id=request.submit.request_id, error=error.message)
        self._holds.abort(request.submit.handle, error)


def phases(ledger: pb.PhaseLedger) -> Iterator[Phase]:
    """Split a prefill's ledger into its spans."""
    yield Phase("prefill.queue", ledger.submitted_ns, ledger.scheduled_ns, {})
    yield Phase(
        "prefill.compute",
        ledger.scheduled_ns,
        ledger.first_token_ns,
        {
            "tandem.tokens.computed": ledger.num_computed_tokens,
            "tandem.tokens.cached": ledger.num_cached_tokens,
            "gen_ai.usage.input_tokens": ledger.num_prompt_tokens,
        },
    )
