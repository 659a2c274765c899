"""A worker tells each gateway what it may submit: by its stats, by what has come since, and by what waits there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.messages import Reserved
from tandem_worker.grant_sender import GrantSender
from tandem_worker.requests import GatewayStream
from tandem_worker.worker_room import PoolRoom
from tests.tandem_worker.scripted_engine import output
from tests.tandem_worker.test_front import Harness, error_of, harness, kinds, received, submit

BLOCKS, BLOCK_TOKENS, PLACES = 8, 16, 4 + 1
FREE = BLOCKS * BLOCK_TOKENS


@asynccontextmanager
async def granting(max_num_seqs: int = 4) -> AsyncIterator[Harness]:
    async with harness(grants=GrantSender(PoolRoom(max_num_seqs))) as here:
        yield here


def attached(here: Harness) -> GatewayStream:
    stream = GatewayStream()
    here.front.attach(stream)
    here.front.grants.attach(stream)
    return stream


async def grant(stream: GatewayStream) -> pb.Grant:
    """Return the next grant; any other event fails."""
    (event,) = await received(stream, 1)
    assert event.HasField("grant"), event
    return event.grant


def waits(num_tokens: int, num_requests: int, first_tokens: int) -> pb.Demand:
    waiting = pb.WaitingRequests(num_tokens=num_tokens, num_requests=num_requests, first_tokens=first_tokens)
    return pb.Demand(waiting=waiting)


def step(num_used: int = 0, admitted: tuple[str, ...] = (), *outputs: messages.RequestOutput) -> messages.StepDone:
    stats = messages.EngineStats(1, 0, 0, BLOCKS, BLOCKS - num_used, 0, num_used, 0, {})
    return messages.StepDone(1, list(outputs), [], stats, admitted=list(admitted))


def counted(name: str, num_tokens: int) -> pb.Submit:
    return submit(name, grant_tokens=num_tokens)


async def test_a_gateway_that_attaches_is_told_what_it_may_submit() -> None:
    async with granting() as here:
        first = await grant(attached(here))
        assert (first.number, first.num_tokens, first.num_requests) == (1, FREE, 4), "slow start: a few at first"
        assert first.valid_ms == 2000


async def test_two_gateways_have_half_each_until_something_waits_at_one() -> None:
    async with granting() as here:
        one, other = attached(here), attached(here)
        grants = [await grant(one), await grant(other)]
        assert [each.num_requests for each in grants] == [2, 2]
        here.front.grants.demanded(one, waits(90, 9, 10))
        assert (await grant(other)).num_requests == 1
        here.front.grants.demanded(other, pb.Demand(grant_number=2))
        more = await grant(one)
        while more.num_requests < 3:
            more = await grant(one)
        here.front.detach(other)
        assert (await grant(one)).num_requests == 4


async def test_what_has_come_takes_room_until_it_has_ended() -> None:
    async with granting() as here:
        stream = attached(here)
        await grant(stream)
        here.front.submit(stream, counted("a", 40))
        here.front.grants.demanded(stream, waits(1000, 10, 100))
        here.engine.emit(Reserved("a.0", 0))
        here.engine.emit(step(3, ("a.0",), output("a.0", 3, [7])))
        events = await received(stream, 3)
        assert kinds(events) == ["accepted", "step", "grant"]
        assert events[2].grant.num_requests == 1 + 4, "five places, one is taken; the first token doubles the start"
        assert events[2].grant.num_tokens == 40 + FREE - 3 * BLOCK_TOKENS - BLOCK_TOKENS, "and it grows by a block"
        here.engine.emit(step(0, (), output("a.0", 4, [8], is_last=True)))
        events = await received(stream, 2)
        assert kinds(events) == ["step", "grant"]
        assert events[1].grant.num_requests == 1 + PLACES
        assert events[1].grant.num_tokens == 40 + 100, "an idle worker takes it; the rest is for its growth"


async def test_tables_name_each_gateway_with_what_it_has_submitted_and_still_may() -> None:
    async with granting() as here:
        stream = attached(here)
        stream.gateway_id = "gateway-1"
        (row,) = here.front.tables(10).attachments
        assert (row.gateway_id, row.num_requests_submitted, row.num_requests_granted) == ("gateway-1", 0, 0)
        first = await grant(stream)
        here.front.submit(stream, counted("a", 20))
        (row,) = here.front.tables(10).attachments
        assert (row.num_tokens_submitted, row.num_requests_submitted) == (20, 1)
        assert row.num_tokens_granted == first.num_tokens - 20
        assert row.num_requests_granted == first.num_requests - 1
        here.front.detach(stream)
        assert not here.front.tables(10).attachments


async def test_a_refusal_carries_a_grant_for_less_and_an_end_for_more() -> None:
    async with granting() as here:
        stream = attached(here)
        await grant(stream)
        here.front.submit(stream, counted("running", 10))
        here.front.submit(stream, counted("large", 100))
        here.engine.emit(Reserved("running.0", 0))
        here.engine.emit(messages.Refused("large.0", "kv_full", "why"))
        accepted, refused = await received(stream, 2)
        assert kinds([accepted, refused]) == ["accepted", "refused"] and error_of(refused) == "Overloaded"
        assert refused.refused.grant.number == 2
        assert refused.refused.grant.num_tokens < 110 + 100, "what the engine keeps for others is not in its stats"
        here.front.grants.demanded(stream, waits(1000, 10, 100))
        here.engine.emit(step(0, ("running.0",), output("running.0", 3, [8], is_last=True)))
        events = await received(stream, 2)
        assert kinds(events) == ["step", "grant"]
        assert events[1].grant.num_tokens == 110 + 100


async def test_an_account_is_charged_for_prompt_and_answer_and_gets_back_what_was_not_used() -> None:
    async with granting() as here:
        stream, other = attached(here), attached(here)

        def ask(name: str, work: float, work_of_answer: float) -> None:
            charged = submit(name, grant_tokens=10, fairness_key="greedy", work=work, work_of_answer=work_of_answer)
            here.front.submit(stream, charged)

        def tell() -> None:
            for each, account in ((stream, "greedy"), (other, "small")):
                demand = waits(1000, 10, 100)
                demand.waiting.accounts.add(fairness_key=account, num_requests=10, work=100.0)
                here.front.grants.demanded(each, demand)

        async def lead() -> float:
            """Return by how much the one account is ahead, as the next grant says."""
            while not (events := [e for e in await received(stream, 1) if e.grant.turns]):
                pass
            return {turn.fairness_key: turn.lead for turn in events[0].grant.turns}["greedy"]

        tell()
        assert await lead() == 0
        ask("short", 30.0, 20.0)
        ask("long", 5.0, 1.0)
        ask("refused", 1000.0, 900.0)
        here.engine.emit(messages.Refused("refused.0", "kv_full", "why"))
        assert await lead() == 35, "the refusal carries the next grant"
        here.engine.emit(Reserved("short.0", 0))
        here.engine.emit(Reserved("long.0", 0))
        here.engine.emit(step(1, ("short.0", "long.0"), output("long.0", 3, [7, 7, 7])))
        here.engine.emit(step(1, (), output("short.0", 3, [8], is_last=True)))
        assert await lead() == (30 - 19) + (5 + 2), "one token of twenty, and three in place of one"


async def test_what_a_gateway_does_not_count_takes_room_and_nothing_of_its_grants() -> None:
    async with granting() as here:
        stream, old = attached(here), GatewayStream()
        here.front.attach(old)
        await grant(stream)
        here.front.submit(old, submit("old"))
        here.engine.emit(step(1, ("old.0",), output("old.0", 3, [7])))
        assert kinds(await received(old, 1)) == ["step"]
        here.front.submit(stream, counted("new", 16))
        here.front.grants.demanded(stream, waits(1000, 10, 100))
        here.engine.emit(step(2, ("new.0",), output("new.0", 3, [7])))
        here.engine.emit(step(1, (), output("old.0", 4, [7], is_last=True)))
        events = await received(stream, 2)
        assert kinds(events) == ["step", "grant"]
        assert events[1].grant.num_requests == 1 + PLACES - 1, "one of its own has come, and one place is taken"
        assert kinds(await received(old, 1)) == ["step"]
        assert await rest(old) == [], "a gateway of a release before is granted nothing"


async def test_a_worker_that_drains_grants_nothing_more() -> None:
    async with granting() as here:
        stream = attached(here)
        await grant(stream)
        await asyncio.wait_for(here.front.drain(10), 10)
        here.front.grants.demanded(stream, waits(1000, 10, 100))
        attached(here)
        assert await rest(stream) == []


async def test_a_worker_without_grants_says_so_and_counts_nobody() -> None:
    async with harness() as here:
        stream = attached(here)
        here.front.submit(stream, counted("a", 40))
        here.front.grants.demanded(stream, waits(1000, 10, 100))
        assert not here.front.grants.is_used
        assert await rest(stream) == []


async def rest(stream: GatewayStream) -> list[pb.Event]:
    """Return what was sent on a stream and not received, once all that is due has been done."""
    await asyncio.sleep(0)
    stream.close()
    return [event async for event in stream.events()]
