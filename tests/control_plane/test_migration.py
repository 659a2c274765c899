"""Does a stream outlive its worker?"""

from __future__ import annotations

import asyncio

import pytest

from runtime.errors import InternalError, Unavailable
from tandem.v1 import types_pb2 as pb
from tests.control_plane.house import FULL, PROMPT, answer, ask, tokens_of, world
from tests.control_plane.scripted_worker import (
    PREFILL,
    Say,
    ScriptedWorker,
    fail_after,
    lose_after,
    refuse_with,
    serve,
    silent,
)


async def test_a_lost_decode_worker_costs_no_token() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(3)), ScriptedWorker("b")
    async with world(ScriptedWorker("p", PREFILL), dying, heir) as here:
        assert await tokens_of(await here.dispatcher.submit(ask())) == [answer()]
        (moved,) = heir.submits
        assert list(moved.token_ids) == [*PROMPT, *answer(3)]
        assert moved.num_prompt_tokens == len(PROMPT) and not moved.HasField("handle")
        assert "release r-0" in here.kv.calls


async def test_every_one_of_many_choices_survives_its_worker() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b")
    async with world(dying, heir, queue_seconds=5) as here:
        assert await tokens_of(await here.dispatcher.submit(ask(num_choices=6))) == [answer()] * 6


async def test_a_stream_pauses_until_its_only_worker_is_back() -> None:
    first = ScriptedWorker("d", behave=lose_after(2))
    async with world(first, queue_seconds=10) as here:
        deltas = aiter(await here.dispatcher.submit(ask()))
        assert (await anext(deltas)).token_ids == tuple(answer(2))
        await here.add(ScriptedWorker("d", life=1))
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[2:]


async def test_a_stream_pauses_while_the_worker_it_moves_to_is_full() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=refuse_with(FULL))
    async with world(dying, heir, queue_seconds=10) as here:
        flight = asyncio.create_task(tokens_of(await here.dispatcher.submit(ask())))
        await heir.until(lambda heir: len(heir.submits) >= 1)
        heir.behave = serve
        assert await flight == [answer()]


async def test_a_stream_that_cannot_go_on_ends_in_the_error_that_stopped_it() -> None:
    async with world(ScriptedWorker("d", behave=fail_after(2, InternalError("out of luck")))) as here:
        flight = await here.dispatcher.submit(ask())
        with pytest.raises(InternalError, match="out of luck"):
            await tokens_of(flight)


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind() -> None:
    dying, mute = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=silent)
    async with world(dying, mute, queue_seconds=10) as here:
        flight = await here.dispatcher.submit(ask())
        await mute.until(lambda mute: len(mute.submits) == 1)
        await flight.aclose()
        await mute.until(lambda mute: len(mute.cancels) == 1)
        await asyncio.gather(*here.dispatcher.background, return_exceptions=True)
        assert len(mute.submits) == 1


async def test_a_worker_that_contradicts_the_tokens_delivered_goes_on_from_those() -> None:
    """Prefill's token one was delivered; decode, which had to compute the prompt itself, finds another."""

    async def contradict(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        await asyncio.gather(first_came.wait())
        worker.behave = serve
        say.tokens(submit, len(PROMPT), [7, 8])

    first_came = asyncio.Event()
    decode = ScriptedWorker("d", behave=contradict)
    async with world(ScriptedWorker("p", PREFILL), decode, queue_seconds=5) as here:
        deltas = aiter(await here.dispatcher.submit(ask()))
        assert (await anext(deltas)).token_ids == tuple(answer(1))
        first_came.set()
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[1:]
        assert list(decode.submits[-1].token_ids) == [*PROMPT, *answer(1)]


async def test_stopping_a_choice_that_moves_does_not_end_the_others() -> None:
    async def move_choice_zero(worker: ScriptedWorker, say: Say, submit: pb.Submit) -> None:
        say.accept(submit)
        if submit.choice_index == 0:
            say.tokens(submit, len(PROMPT), answer(1))
            say.fail(submit, Unavailable("this one only"))
        else:
            await stopped.wait()
            await serve(worker, say, submit)

    stopped = asyncio.Event()
    first, second = ScriptedWorker("a", behave=move_choice_zero), ScriptedWorker("b", behave=silent)
    async with world(first, second, queue_seconds=5) as here:
        flight = await here.dispatcher.submit(ask(num_choices=2))
        await second.until(lambda second: len(second.submits) == 1)
        await flight.stop_choice(0)
        stopped.set()
        assert (await tokens_of(flight))[1] == answer()
