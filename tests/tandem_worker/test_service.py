"""The events of a real Attach stream, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import HandleRow, TablesReply, TablesRequest
from tandem.v1.worker_pb2 import DrainRequest
from tandem_engine.messages import AddRequest
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import InvalidRequest, KvNotFound, StaleIncarnation
from tandem_runtime.kv.table_parts import answer_parts
from tandem_runtime.server import GrpcServer
from tandem_worker.grant_sender import GrantSender
from tandem_worker.model_card import AssetStore
from tandem_worker.requests import GatewayStream
from tandem_worker.service import WorkerService
from tandem_worker.worker_room import PoolRoom
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import output, step
from tests.tandem_worker.test_front import Harness, error_of, harness, kinds, submit


@asynccontextmanager
async def served(
    grants: GrantSender | None = None, most_unread_bytes: int | None = None
) -> AsyncIterator[tuple[Harness, Any]]:
    async with harness(grants=grants) as here:
        service = WorkerService(here.front, AssetStore(), pb.WorkerInfo)
        server = GrpcServer(
            "127.0.0.1:0", lambda grpc: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc), []
        )
        async with open_channel(await server.start(), most_unread_bytes=most_unread_bytes) as channel:
            yield here, worker_pb2_grpc.WorkerServiceStub(channel)
        await server.stop(0)


def hello(incarnation: str = "worker-1", *, counts_events: bool = False) -> pb.Command:
    hello = pb.AttachHello(gateway_id="g", worker_incarnation=incarnation, counts_events=counts_events)
    return pb.Command(hello=hello)


async def command(call: Any, **kind: Any) -> None:
    await call.write(pb.Command(**kind))


async def test_a_gateway_that_means_another_life_is_refused() -> None:
    async with served() as (_, stub):
        call = stub.Attach()
        await call.write(hello("an earlier one"))
        with pytest.raises(StaleIncarnation):
            await asyncio.wait_for(call.read(), 10)


async def test_a_gateway_that_hangs_up_takes_its_requests_with_it() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        await call.write(hello())
        await command(call, submit=submit())
        assert (await call.read()).HasField("hello")
        here.engine.emit(step([output("r.0", 3, [7])]))
        assert (await call.read()).HasField("step")
        call.cancel()
        await asyncio.wait_for(here.front.drain(10), 10)
        assert [type(error).__name__ for error in here.connector.ends] == ["Cancelled"]


async def test_a_gateway_that_uses_grants_is_granted_room_and_hears_of_what_waits_elsewhere() -> None:
    async with served(GrantSender(PoolRoom(4))) as (_, stub):
        one, other, old = stub.Attach(), stub.Attach(), stub.Attach()
        attached = hello()
        attached.hello.uses_grants = True
        await one.write(attached)
        assert (await one.read()).hello.uses_grants
        assert (await one.read()).grant.num_requests == 4
        await old.write(hello())
        assert (await old.read()).hello.uses_grants
        await other.write(attached)
        assert (await other.read()).HasField("hello")
        lower = (await one.read()).grant
        assert (lower.number, lower.num_requests) == (2, 2), "its part, as soon as another one attaches"
        await command(
            other, demand=pb.Demand(waiting=pb.WaitingRequests(num_tokens=30, num_requests=3, first_tokens=9))
        )
        lower = (await one.read()).grant
        assert (lower.number, lower.num_requests) == (3, 1), "the other one waits"
        await command(one, demand=pb.Demand(grant_number=lower.number))
        grant = (await other.read()).grant
        while grant.num_requests < 3:
            grant = (await other.read()).grant
        for call in (one, other, old):
            call.cancel()


async def test_a_worker_that_grants_nothing_tells_the_gateway() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        attached = hello()
        attached.hello.uses_grants = True
        await call.write(attached)
        assert not (await call.read()).hello.uses_grants
        await command(call, demand=pb.Demand(waiting=pb.WaitingRequests(num_requests=3)))
        await command(call, submit=submit())
        await until(lambda: len(here.engine.sent_of(AddRequest)) == 1)
        call.cancel()


async def test_requests_that_share_a_prompt_are_as_if_each_had_brought_it() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        await call.write(hello())
        assert (await call.read()).hello.takes_choices
        shared = pb.Submit(token_ids=[1, 2, 3], block_hashes=[b"h" * 16])
        choices = []
        for index in range(3):
            own = submit(f"r-{index}")
            own.token_ids[:] = [9] * index
            own.sampling.seed = index
            choices.append(own)
        await command(call, choices=pb.SubmitChoices(shared=shared, choices=choices))
        await until(lambda: len(here.engine.sent_of(AddRequest)) == 3)
        sent = here.engine.sent_of(AddRequest)
        assert [each.request_id for each in sent] == ["r-0.0", "r-1.0", "r-2.0"]
        assert [each.token_ids for each in sent] == [[1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9, 9]]
        assert [each.sampling.seed for each in sent] == [0, 1, 2]
        assert all(each.block_hashes == [(b"h" * 16).hex()] for each in sent)
        call.cancel()
        await asyncio.wait_for(here.front.drain(10), 10)


async def test_whoever_hears_that_the_worker_leaves_has_all_of_its_tokens() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        await call.write(hello())
        await command(call, submit=submit())
        assert (await call.read()).HasField("hello")
        await until(lambda: bool(here.engine.sent_of(AddRequest)))
        here.front.state.start_draining()
        for position in range(3, 103):
            here.engine.emit(step([output("r.0", position, [7], is_last=position == 102)]))
        await here.front.drain(10)
        await here.front.end_streams(10)
        events = [event async for event in _rest(call)]
        tokens = [token for event in events for each in event.step.outputs for token in each.token_ids]
        assert tokens == [7] * 100 and set(kinds(events)) == {"step"}


async def _rest(call: Any) -> AsyncIterator[pb.Event]:
    while (event := await call.read()) is not grpc.aio.EOF:
        yield event


async def test_a_request_that_breaks_us_is_refused_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (here, stub):

        def break_once(*args: Any) -> None:
            monkeypatch.undo()
            raise KeyError("an error in the front")

        monkeypatch.setattr(here.front, "submit", break_once)
        call = stub.Attach()
        await call.write(hello())
        await command(call, submit=submit("bad"))
        await command(call, submit=submit("good"))
        assert (await call.read()).HasField("hello")
        assert error_of(await call.read()) == "InternalError"
        here.engine.emit(step([output("good.0", 3, [7], is_last=True)]))
        assert (await call.read()).step.outputs[0].request_id == "good"


async def test_an_asset_nobody_offered_is_not_found() -> None:
    async with served() as (_, stub):
        with pytest.raises(KvNotFound, match="no asset"):
            async for _chunk in stub.GetAsset(pb.AssetRequest(digest=b"x")):
                pass


async def test_an_operator_drains_and_resumes_and_what_runs_goes_on() -> None:
    async with served() as (here, stub):
        reports = []
        here.front.state.when_changed(lambda: reports.append(here.front.load().state))
        call = stub.Attach()
        await call.write(hello())
        assert (await call.read()).HasField("hello")
        await command(call, submit=submit("before"))
        await until(lambda: len(here.engine.sent_of(AddRequest)) == 1)
        for _ in range(2):  # repeating changes nothing
            assert (await stub.Drain(DrainRequest(incarnation="worker-1"))).state == pb.WORKER_STATE_DRAINING
        await command(call, submit=submit("during"))
        assert error_of(await call.read()) == "Draining"
        here.engine.emit(step([output("before.0", 3, [7])]))
        assert list((await call.read()).step.outputs[0].token_ids) == [7]
        assert (await stub.Drain(DrainRequest(incarnation="worker-1", resume=True))).state == pb.WORKER_STATE_READY
        await command(call, submit=submit("after"))
        await until(lambda: [added.request_id for added in here.engine.sent_of(AddRequest)] == ["before.0", "after.0"])
        assert reports == [pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_READY], "all gateways hear at once"


async def test_a_drain_for_an_earlier_life_is_refused() -> None:
    async with served() as (here, stub):
        with pytest.raises(StaleIncarnation):
            await stub.Drain(DrainRequest(incarnation="an earlier one"))
        assert here.front.load().state == pb.WORKER_STATE_READY


async def test_a_worker_that_is_about_to_end_cannot_be_resumed() -> None:
    async with served() as (here, stub):
        here.front.state.start_draining()
        with pytest.raises(InvalidRequest, match="about to end"):
            await stub.Drain(DrainRequest(incarnation="worker-1", resume=True))


def ask_tables(number: int = 1) -> pb.AskTables:
    return pb.AskTables(number=number, max_rows=4096)


async def test_the_auditor_gets_the_tables_over_attach_as_by_a_call() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        await call.write(hello())
        assert (await call.read()).hello.answers_tables
        await command(call, submit=submit())
        await until(lambda: bool(here.engine.sent_of(AddRequest)))
        await command(call, tables=ask_tables())
        part = (await call.read()).tables
        assert (part.number, part.is_last) == (1, True)
        told, by_call = TablesReply.FromString(part.data), await stub.Tables(TablesRequest(max_rows=4096))
        assert [row.request_id for row in told.requests] == ["r"]
        for reply in (told, by_call):
            reply.ClearField("now_unix_ms")
            reply.requests[0].ClearField("deadline_unix_ms")
        assert told == by_call
        call.cancel()


async def test_tokens_wait_for_one_part_of_a_huge_table_at_most() -> None:
    async with harness() as here:
        stream = GatewayStream("g")
        here.front.submit(stream, submit())
        await until(lambda: bool(here.engine.sent_of(AddRequest)))
        parts = answer_parts(ask_tables(), lambda max_rows: TablesReply(handles=[HandleRow(handle_id=bytes(200_000))]))
        stream.send_tables(parts)
        events = stream.events()
        assert (await anext(events)).HasField("tables")
        here.engine.emit(step([output("r.0", 3, [7])]))
        await until(lambda: len(stream._queue) == 2)
        assert kinds([await anext(events) for _ in range(3)]) == ["tables", "step", "tables"]
        rest = [await anext(events) for _ in range(len(parts) - 3)]
        assert [event.tables for event in rest] == parts[3:]


async def test_a_later_question_is_answered_and_the_rest_of_the_earlier_answer_is_left_out() -> None:
    stream = GatewayStream("g")
    parts = [pb.TablesPart(number=number, is_last=is_last) for number in (1, 2) for is_last in (False, False, True)]
    stream.send_tables(parts[:3])
    events = stream.events()
    assert (await anext(events)).tables == parts[0]
    stream.send_tables(parts[3:])
    stream.send(pb.Event(hello=pb.AttachHello()))
    assert [(await anext(events)).WhichOneof("kind") for _ in range(4)] == ["tables", "hello", "tables", "tables"]
    stream.close()
    assert [event async for event in events] == []


async def test_tables_that_cannot_be_made_end_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (here, stub):

        def broken(max_rows: int) -> TablesReply:
            raise ZeroDivisionError

        monkeypatch.setattr(here.front, "tables", broken)
        call = stub.Attach()
        await call.write(hello())
        assert (await call.read()).HasField("hello")
        await command(call, submit=submit())
        await command(call, tables=ask_tables())
        assert "could not be made" in (await call.read()).tables.error.message
        here.engine.emit(step([output("r.0", 3, [7])]))
        assert (await call.read()).HasField("step")
        call.cancel()


async def test_a_gateway_that_reads_slowly_gets_fewer_and_larger_batches_and_no_token_twice_or_late() -> None:
    """It reads nothing for thousands of steps; what is sent after them comes behind few of them."""
    num_steps = 8_000
    async with served(most_unread_bytes=16 * 1024) as (here, stub):
        call = stub.Attach()
        await call.write(hello())
        assert (await call.read()).HasField("hello")
        await command(call, submit=submit())
        await until(lambda: bool(here.engine.sent_of(AddRequest)))
        for number in range(num_steps):
            here.engine.emit(step([output("r.0", 3 + number, [number % 999])]))
            await asyncio.sleep(0)  # the worker sends what it can
        here.engine.emit(step([output("r.0", 3 + num_steps, [7], is_last=True)]))
        tokens: list[int] = []
        num_messages, is_last = 0, False
        while not is_last:
            event = await asyncio.wait_for(call.read(), 10)
            num_messages += 1
            for each in event.step.outputs:
                assert each.position == 3 + len(tokens)
                tokens += each.token_ids
                is_last = each.finish_reason == pb.FINISH_REASON_LENGTH and each.HasField("ledger")
        assert tokens == [*(number % 999 for number in range(num_steps)), 7]
        assert num_messages < num_steps / 2
        call.cancel()


async def test_a_gateway_that_counts_events_has_few_on_their_way_and_then_the_rest_together() -> None:
    async with served() as (here, stub):
        call = stub.Attach()
        await call.write(hello(counts_events=True))
        assert (await call.read()).hello.counts_events
        await command(call, submit=submit())
        await until(lambda: bool(here.engine.sent_of(AddRequest)))
        (stream,) = here.front._streams
        for number in range(15):  # after the hello
            here.engine.emit(step([output("r.0", 3 + number, [number])]))
            await until(partial(_has_sent, stream, number + 2))
        for number in range(15, 100):
            here.engine.emit(step([output("r.0", 3 + number, [number])]))
        await until(lambda: [_num_tokens(each) for each in stream._queue] == [85])
        events = [await call.read() for _ in range(15)]
        await command(call, read=pb.EventsRead(num_events=16))
        events.append(await asyncio.wait_for(call.read(), 10))
        assert [token for event in events for token in event.step.outputs[0].token_ids] == [*range(100)]
        call.cancel()


def _num_tokens(event: object) -> int:
    assert isinstance(event, pb.Event)
    return sum(len(each.token_ids) for each in event.step.outputs)


def _has_sent(stream: GatewayStream, number: int) -> bool:
    return stream._num_sent == number
