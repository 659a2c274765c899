"""Every request of a worker ends with its last token or with an error, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_engine import messages
from tandem_engine.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    RequestAborted,
    RequestFailed,
    Reserved,
)
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.device_reader import EngineMemory
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError, from_proto
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import fold, space_of
from tandem_runtime.model_table import Exactness
from tandem_worker.engine_link import EngineRegions
from tandem_worker.engine_state import EXIT_CONFIG
from tandem_worker.front import WorkerFront
from tandem_worker.grant_sender import GrantSender
from tandem_worker.kv_connector import KVConnector
from tandem_worker.kv_link import KvLink
from tandem_worker.kv_offload import KVOffload
from tandem_worker.model_card import fingerprint, kv_layout, model_card
from tandem_worker.requests import ActiveRequest, GatewayStream, PhaseSpan, RequestTable
from tests.tandem_worker.scripted_engine import LAYOUT, ScriptedEngine, output, ready, step

MODEL = pb.ModelRef(model_id="m", fingerprint=fingerprint(ready().model).digest)


class FakeConnector(KVConnector):
    """Moves no KV blocks; records how requests ended."""

    def __init__(self) -> None:
        self.ends: list[TandemError | None] = []
        self.output_error: Exception | None = None
        self.ready_error: Exception | None = None
        self.is_drained = asyncio.Event()
        self.is_drained.set()

    def mode(self, submit: pb.Submit) -> messages.Mode:
        return "aggregated"

    def on_ready(self, ready: messages.Ready, fds: Sequence[int]) -> None: ...

    async def wait_ready(self) -> None:
        if self.ready_error is not None:
            raise self.ready_error

    def on_reserved(self, request: ActiveRequest, reserved: Reserved) -> None: ...

    def on_sealed(self, sealed: messages.SealedBlocks) -> None: ...

    def on_output(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        if self.output_error is not None:
            raise self.output_error

    def on_imported(self, imported: messages.SlabImported) -> None: ...

    def on_end(self, request: ActiveRequest, error: TandemError | None) -> None:
        self.ends.append(error)

    def spans(self, ledger: pb.PhaseLedger) -> Sequence[PhaseSpan]:
        return []

    def counters(self) -> dict[str, float]:
        return {}

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None: ...

    @property
    def kv_address(self) -> str:
        return ""

    async def wait_drained(self) -> None:
        await self.is_drained.wait()

    async def close(self) -> None: ...


class Harness:
    def __init__(self, exactness: Exactness = "class", grants: GrantSender | None = None) -> None:
        self.engine = ScriptedEngine()
        self.connector = FakeConnector()
        link = KvLink("worker-1", lease_seconds=10.0)  # to no KV service
        offload = KVOffload(self.engine, link, EngineRegions(self.engine, link), "worker-1")
        self.front = WorkerFront(
            "worker-1", self.engine, RequestTable(), self.connector, offload, 10.0, exactness, grants
        )
        self.pump = asyncio.create_task(self.front.pump())
        self.is_ready = asyncio.Event()
        self.front.when_ready(lambda paths: self.is_ready.set())

    async def load(self) -> None:
        self.engine.emit(ready())
        await asyncio.wait_for(self.is_ready.wait(), 10)


@asynccontextmanager
async def harness(exactness: Exactness = "class", grants: GrantSender | None = None) -> AsyncIterator[Harness]:
    """Yield a front over a scripted engine that has loaded."""
    here = Harness(exactness, grants)
    await here.load()
    try:
        yield here
    finally:
        await here.front.close()
        await asyncio.wait_for(here.pump, 10)


def submit(name: str = "r", seconds: float = 60.0, **fields: Any) -> pb.Submit:
    values: dict[str, Any] = {
        "model": MODEL,
        "sampling": pb.SamplingParams(max_tokens=4, top_p=1, repetition_penalty=1),
    }
    return pb.Submit(
        request_id=name,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        deadline_unix_ms=int((time.time() + seconds) * 1000),
        **{**values, **fields},
    )


async def received(stream: GatewayStream, num_events: int) -> list[pb.Event]:
    events = stream.events()
    async with asyncio.timeout(10):
        return [await anext(events) for _ in range(num_events)]


def error_of(event: pb.Event) -> str:
    detail = event.failed.error if event.HasField("failed") else event.refused.error
    return type(from_proto(detail)).__name__


def kinds(events: Sequence[pb.Event]) -> list[str | None]:
    return [event.WhichOneof("kind") for event in events]


async def test_a_request_is_accepted_answered_and_over() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit(attempt=2))
        (added,) = here.engine.sent_of(AddRequest)
        assert (added.request_id, added.token_ids) == ("r.2", [1, 2, 3])
        here.engine.emit(Reserved("r.2", 0))
        here.engine.emit(step([output("r.2", 3, [7])]))
        events = await received(stream, 2)
        here.engine.emit(step([output("r.2", 4, [8, 9], is_last=True)]))
        events += await received(stream, 1)
        assert kinds(events) == ["accepted", "step", "step"]
        last = events[2].step.outputs[0]
        assert (last.attempt, list(last.token_ids), last.position) == (2, [8, 9], 4)
        assert last.HasField("ledger") and last.finish_reason == pb.FINISH_REASON_LENGTH
        await asyncio.wait_for(here.front.drain(10), 10)
        assert here.connector.ends == [None]


async def test_one_step_is_one_batch_for_each_gateway() -> None:
    async with harness() as here:
        one, other = GatewayStream(), GatewayStream()
        for stream, name in ((one, "a"), (one, "b"), (other, "c")):
            here.front.submit(stream, submit(name))
        here.engine.emit(step([output(f"{name}.0", 3, [7]) for name in "abc"]))
        assert [len(event.step.outputs) for event in [*await received(one, 1), *await received(other, 1)]] == [2, 1]


async def test_a_request_sent_twice_is_run_once() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit())
        here.front.submit(stream, submit())
        assert len(here.engine.sent_of(AddRequest)) == 1


async def test_the_engines_refusal_reaches_the_gateway_as_its_kind() -> None:
    async with harness() as here:
        stream = GatewayStream()
        for reason in ("kv_full", "context"):
            here.front.submit(stream, submit(reason))
            here.engine.emit(messages.Refused(f"{reason}.0", reason, "why"))
        events = await received(stream, 2)
        assert [error_of(event) for event in events] == ["Overloaded", "ContextTooLong"]
        assert events[0].refused.error.retry_after_ms == 1000


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": pb.ModelRef(model_id="other")}, "ModelNotFound"),
        ({"model": pb.ModelRef(model_id="m", fingerprint=b"x")}, "FingerprintMismatch"),
        ({"sampling": pb.SamplingParams(max_tokens=4, top_p=7)}, "InvalidRequest"),
        ({"seconds": -1.0}, "DeadlineExceeded"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_the_engine_hears_of_it(
    fields: dict[str, Any], error: str
) -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit(**fields))
        assert [error_of(event) for event in await received(stream, 1)] == [error]
        assert here.engine.sent == []


async def test_hashes_of_a_gateway_reach_the_engine_as_keys_and_its_chain_goes_on() -> None:
    async with harness() as here:
        hashes = hash_blocks(hash_root(b"identity", 8), range(20), 8)  # the blocks of this engine have 16 tokens
        spaced = submit(space=space(), hash_grain=8, hash_root=b"r" * 16, block_hashes=hashes, max_left_blocks=1)
        here.front.submit(GatewayStream(), spaced)
        (added,) = here.engine.sent_of(AddRequest)
        assert (added.block_hashes, added.max_left_blocks) == ([fold(hashes[1], space()).hex()], 0)
        assert added.chain == messages.ChainEnd(hashes[1].hex(), 16, 8, space().hex())
        of_release_0_2 = submit("old", hash_root=b"r" * 16, block_hashes=[b"k" * 16])
        here.front.submit(GatewayStream(), of_release_0_2)
        added = here.engine.sent_of(AddRequest)[1]
        assert (added.block_hashes, added.chain) == ([(b"k" * 16).hex()], None)


def space(exactness: Exactness = "class") -> bytes:
    return space_of(model_card(ready(), exactness))


def a_handle(digest: bytes = MODEL.fingerprint, layout: bytes = layout_digest(kv_layout(LAYOUT))) -> pb.KvHandle:
    return pb.KvHandle(model=pb.ModelRef(model_id="m", fingerprint=digest), layout_digest=layout)


IN_ANOTHER_LAYOUT: dict[str, Any] = {
    "handle": a_handle(layout=layout_digest(pb.KvLayout(version=2))),
    "handle_layout": pb.KvLayout(version=2),
}


@pytest.mark.parametrize(
    ("exactness", "fields", "refused_field"),
    [
        ("class", {"handle": a_handle()}, ""),
        ("class", {"handle": a_handle(), "space": space()}, ""),
        ("class", {"handle": a_handle(b"f" * 16), "space": space()}, "handle.model.fingerprint"),
        ("class", {"handle": a_handle(layout=b"l" * 16), "space": space()}, "handle.layout_digest"),
        ("class", {"space": space("layout")}, "space"),
        ("class", {"space": space(), "hash_grain": 12}, "hash_grain"),
        ("layout", {"handle": a_handle(b"f" * 16), "space": space("layout")}, ""),
        ("layout", {"handle": a_handle(b"f" * 16)}, "handle.model.fingerprint"),  # release 0.2 knows one class
        ("layout", {"handle": a_handle(layout=b"l" * 16), "space": space("layout")}, "handle.layout_digest"),
        # Decode converts blocks of a layout that the gateway states, and checks it; but only under "layout".
        ("layout", {**IN_ANOTHER_LAYOUT, "space": space("layout")}, ""),
        ("layout", IN_ANOTHER_LAYOUT, "handle.layout_digest"),
        ("class", {**IN_ANOTHER_LAYOUT, "space": space()}, "handle.layout_digest"),
        ("layout", {"space": space()}, "space"),
    ],
)
async def test_a_worker_reads_only_blocks_of_its_own_space(
    exactness: Exactness, fields: dict[str, Any], refused_field: str
) -> None:
    async with harness(exactness) as here:
        stream = GatewayStream()
        here.front.submit(stream, submit(**fields))
        here.engine.emit(Reserved("r.0", 0))
        if not refused_field:
            assert kinds(await received(stream, 1)) == ["accepted"]
            return
        (event,) = await received(stream, 1)
        assert error_of(event) == "FingerprintMismatch" and event.refused.error.field == refused_field
        assert here.engine.sent == []


def test_a_card_states_how_exact_the_model_is_and_that_the_worker_takes_spaces() -> None:
    assert (model_card(ready()).exactness, model_card(ready()).takes_spaces) == ("class", True)
    assert model_card(ready(), "layout").exactness == "layout"


async def test_the_time_left_counts_and_not_what_the_two_clocks_say() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit("late by its clock", seconds=-3600.0, time_left_ms=60_000))
        (request,) = here.front._requests
        assert 59.0 < request.seconds_left <= 60.0
        here.front.submit(stream, submit("early by its clock", seconds=3600.0, time_left_ms=0))
        assert error_of((await received(stream, 1))[0]) == "DeadlineExceeded"
        here.front.submit(stream, submit("of release 0.2", seconds=-1.0))
        assert error_of((await received(stream, 1))[0]) == "DeadlineExceeded"


async def test_a_request_ends_at_its_deadline() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.engine.answer = answer_aborts(here.engine)
        here.front.submit(stream, submit(seconds=0.05))
        (failed,) = await received(stream, 1)
        assert (error_of(failed), failed.failed.ledger.num_computed_tokens) == ("DeadlineExceeded", 2)
        assert here.engine.sent[-1] == AbortRequest("r.0")
        here.engine.emit(step([output("r.0", 3, [7])]))  # sent before the abort: the front drops it
        here.front.submit(stream, submit("next"))
        here.engine.emit(Reserved("next.0", 0))
        assert kinds(await received(stream, 1)) == ["accepted"]


def answer_aborts(engine: ScriptedEngine) -> Callable[[messages.Command], None]:
    def answer(command: messages.Command) -> None:
        if isinstance(command, AbortRequest):
            engine.emit(RequestAborted(command.request_id, num_computed_tokens=2, num_cached_tokens=1))

    return answer


async def test_a_cancel_is_answered_with_what_was_computed() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit())
        here.front.cancel(stream, pb.Cancel(request_id="r"))
        assert [type(error).__name__ for error in here.connector.ends] == ["Cancelled"], "at once, whatever the engine"
        here.engine.emit(RequestAborted("r.0", num_computed_tokens=2, num_cached_tokens=1))
        (failed,) = await received(stream, 1)
        ledger = failed.failed.ledger
        assert error_of(failed) == "Cancelled"
        assert (ledger.num_prompt_tokens, ledger.num_computed_tokens, ledger.num_cached_tokens) == (3, 2, 1)


async def test_a_cancel_that_the_engine_did_not_live_to_answer_is_answered_without_figures() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit())
        here.front.cancel(stream, pb.Cancel(request_id="r"))
        here.engine.end()
        (failed,) = await received(stream, 1)
        assert error_of(failed) == "Cancelled" and not failed.failed.HasField("ledger")


async def test_only_the_gateway_that_asked_can_cancel() -> None:
    async with harness() as here:
        mine, other = GatewayStream(), GatewayStream()
        here.front.submit(mine, submit())
        here.front.cancel(other, pb.Cancel(request_id="r"))
        here.front.cancel(mine, pb.Cancel(request_id="r", attempt=1))
        assert here.engine.sent_of(AbortRequest) == []
        here.front.cancel(mine, pb.Cancel(request_id="r"))
        here.front.cancel(mine, pb.Cancel(request_id="r"))
        assert here.engine.sent_of(AbortRequest) == [AbortRequest("r.0")]
        assert [type(error).__name__ for error in here.connector.ends] == ["Cancelled"]


async def test_a_gateway_that_is_gone_takes_its_requests_with_it_and_no_others() -> None:
    async with harness() as here:
        gone, other = GatewayStream(), GatewayStream()
        for stream, name in ((gone, "a"), (gone, "b"), (other, "c")):
            here.front.attach(stream)
            here.front.submit(stream, submit(name))
        here.front.detach(gone)
        assert here.engine.sent_of(AbortRequest) == [AbortRequest("a.0"), AbortRequest("b.0")]


async def test_a_request_that_breaks_the_engines_step_fails_alone() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit("bad"))
        here.front.submit(stream, submit("good"))
        here.engine.emit(RequestFailed("bad.0", "nan"))
        here.engine.emit(step([output("good.0", 3, [7], is_last=True)]))
        assert kinds(await received(stream, 2)) == ["failed", "step"]


@pytest.mark.parametrize(("kind", "code"), [("internal", 1), ("invalid", EXIT_CONFIG), ("unsupported", EXIT_CONFIG)])
async def test_a_dead_engine_fails_all_requests_so_that_they_go_on_elsewhere(kind: Any, code: int) -> None:
    async with harness() as here:
        stream = GatewayStream()
        for name in "ab":
            here.front.submit(stream, submit(name))
        here.engine.emit(EngineFailed("out of memory", kind))
        here.engine.end()
        await asyncio.wait_for(here.front.state.stopped.wait(), 10)
        here.front.submit(stream, submit("late"))
        events = await received(stream, 3)
        assert kinds(events) == ["failed", "failed", "refused"]
        assert {error_of(event) for event in events} == {"Unavailable"}  # never the caller's fault
        assert (here.front.load().state, here.front.state.exit_code) == (pb.WORKER_STATE_FAILED, code)


async def test_a_bug_of_the_fronts_ends_the_worker_and_says_so() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.connector.output_error = KeyError("front")
        here.front.submit(stream, submit())
        here.engine.emit(step([output("r.0", 3, [7])]))
        await asyncio.wait_for(here.front.state.stopped.wait(), 10)
        assert [error_of(event) for event in await received(stream, 1)] == ["Unavailable"]
        assert isinstance(here.front.state.failure, InternalError) and here.front.state.exit_code == 1


@pytest.mark.parametrize(("error", "code"), [(OSError("no tokenizer"), 1), (InvalidRequest("no"), EXIT_CONFIG)])
async def test_a_worker_that_cannot_get_ready_ends_rather_than_load_for_ever(error: Exception, code: int) -> None:
    here = Harness()
    here.connector.ready_error = error
    here.engine.emit(ready())
    await asyncio.wait_for(here.front.state.stopped.wait(), 10)
    assert here.front.state.exit_code == code
    await here.front.close()
    await here.pump


async def test_a_draining_worker_refuses_what_is_new_and_finishes_what_runs() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit("old"))
        here.front.state.start_draining()
        here.front.submit(stream, submit("new"))
        draining = asyncio.create_task(here.front.drain(30))
        assert [error_of(event) for event in await received(stream, 1)] == ["Draining"]
        assert not draining.done()
        here.connector.is_drained.clear()
        here.engine.emit(step([output("old.0", 3, [7], is_last=True)]))
        assert kinds(await received(stream, 1)) == ["step"]
        assert not draining.done()  # another process still reads our blocks
        here.connector.is_drained.set()
        await asyncio.wait_for(draining, 10)
        assert here.front.load().state == pb.WORKER_STATE_DRAINING


async def test_a_drain_that_takes_too_long_lets_requests_go_on_elsewhere() -> None:
    async with harness() as here:
        stream = GatewayStream()
        here.front.submit(stream, submit())
        here.front.state.start_draining()
        await here.front.drain(0.05)
        assert [error_of(event) for event in await received(stream, 1)] == ["Draining"]


async def test_a_worker_told_to_drain_while_it_loads_never_says_it_is_ready() -> None:
    here = Harness()
    here.front.state.start_draining()
    await here.load()
    assert here.front.load().state == pb.WORKER_STATE_DRAINING
    stream = GatewayStream()
    here.front.submit(stream, submit())
    assert [error_of(event) for event in await received(stream, 1)] == ["Draining"]
    await here.front.close()
    await here.pump


async def test_the_pool_is_reported_before_the_first_step() -> None:
    async with harness() as here:
        report = here.front.load()
        assert (report.kv.num_total_blocks, report.kv.num_free_blocks, report.kv.tokens_per_block) == (8, 8, 16)


async def test_what_the_engine_counts_of_its_device_is_known_once_it_has_loaded() -> None:
    async with harness() as here:
        assert here.front.state.engine_memory is None
        here.engine.emit(messages.DeviceMemoryUsed("a uuid", 5))
        here.engine.emit(messages.DeviceMemoryUsed("a uuid", 7))
        async with asyncio.timeout(10):
            while here.front.state.engine_memory != EngineMemory("a uuid", 7):  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
