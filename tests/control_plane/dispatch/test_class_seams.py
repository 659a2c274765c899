"""A stream that goes on at a worker of another numerics class says so; one that stays in its class says nothing.

Either worker may get the request first: each loses a request that begins there, and serves one that moves there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog.testing

from control_plane.dispatch.request_stream import RequestStream
from control_plane.explain.class_seams import Seam
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tests.control_plane.harness import answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    PREFILL,
    AttachStream,
    Behaviour,
    ScriptedWorker,
    fail_after,
    finish,
    serve,
)

ONE, OTHER = "cpu/float32/lean", "cuda/bfloat16/lean"


async def lose_what_begins(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    """Fail an answer that begins here after three tokens; serve an answer that goes on here."""
    is_new = len(submit.token_ids) == submit.num_prompt_tokens
    await (fail_after(3, Unavailable("its engine died")) if is_new else serve)(worker, attach, submit)


def after(event: asyncio.Event) -> Behaviour:
    async def wait(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await event.wait()
        await finish(worker, attach, submit)

    return wait


async def moved_between(
    first: str, second: str, **fields: Any
) -> tuple[RequestStream, list[ScriptedWorker], list[Any]]:
    """Have a request move between workers of two classes; return its stream, the workers in order, and the log."""
    workers = [ScriptedWorker("a", behave=lose_what_begins, numerics_class=first)]
    workers += [ScriptedWorker("b", behave=lose_what_begins, numerics_class=second)]
    async with harness(*workers) as here:
        with structlog.testing.capture_logs() as lines:
            stream = await here.dispatcher.submit(new_request(**fields))
            assert await tokens_of(stream) == [answer()] * len(stream.state.choices)
    workers.sort(key=lambda worker: len(worker.submits[0].token_ids))
    return stream, workers, list(lines)


def named(lines: Sequence[Any], event: str) -> list[Any]:
    return [line for line in lines if line["event"] == event]


async def test_a_move_to_another_class_is_a_seam_in_the_stream_and_the_log() -> None:
    stream, (first, second), lines = await moved_between(ONE, OTHER)
    (seam,) = stream.state.history.seams
    assert (seam.choice, seam.position) == (0, 3)
    assert (seam.before.worker_id, seam.before.numerics_class) == (first.worker_id, first.numerics_class)
    assert (seam.after.worker_id, seam.after.numerics_class) == (second.worker_id, second.numerics_class)
    assert stream.usage.num_seams == 1
    (crossed,) = named(lines, "stream_crossed_class")
    assert (crossed["request_id"], crossed["choice"], crossed["position"]) == ("r", 0, 3)
    assert (crossed["worker"], crossed["from_class"]) == (second.worker_id, first.numerics_class)
    assert crossed["to_class"] == second.numerics_class
    (accepted,) = named(lines, "migration_accepted")
    assert (accepted["worker"], accepted["num_tokens"], accepted["is_exact"]) == (second.worker_id, 3, False)


async def test_a_move_within_a_class_is_no_seam() -> None:
    stream, _, lines = await moved_between(ONE, ONE)
    assert stream.state.history.seams == [] and stream.usage.num_seams == 0
    assert named(lines, "stream_crossed_class") == []
    assert [line["is_exact"] for line in named(lines, "migration_accepted")] == [True]


async def test_a_move_within_a_class_without_equal_bits_is_no_seam_and_not_exact() -> None:
    stream, _, lines = await moved_between("x/batch-dependent", "x/batch-dependent")
    assert stream.usage.num_seams == 0
    assert [line["is_exact"] for line in named(lines, "migration_accepted")] == [False]


async def test_every_choice_has_a_seam_of_its_own() -> None:
    stream, _, lines = await moved_between(ONE, OTHER, num_choices=3)
    assert [(seam.choice, seam.position) for seam in stream.state.history.seams] == [(0, 3), (1, 3), (2, 3)]
    assert stream.usage.num_seams == len(named(lines, "stream_crossed_class")) == 3


async def test_a_seam_that_the_client_did_not_read_is_none() -> None:
    workers = [ScriptedWorker(name, behave=lose_what_begins, numerics_class=name) for name in "ab"]
    async with harness(*workers) as here:
        stream = await here.dispatcher.submit(new_request())
        num_read = 0
        async for _ in stream:
            num_read += 1
            if num_read == 3:
                stream.stop_choice(0)
        assert stream.usage.num_completion_tokens == 3 and stream.usage.num_seams == 0


async def test_prefills_token_is_of_prefills_class() -> None:
    """Where prefill and decode differ, each answer has a seam after its first token; no log line tells of it."""
    first_came = asyncio.Event()
    prefill = ScriptedWorker("p", PREFILL, numerics_class=ONE, exactness="layout")
    decode = ScriptedWorker("d", behave=after(first_came), numerics_class=OTHER, exactness="layout")
    async with harness(prefill, decode) as here:
        with structlog.testing.capture_logs() as lines:
            stream = await here.dispatcher.submit(new_request())
            deltas = aiter(stream)
            await anext(deltas)
            first_came.set()
            assert [token async for delta in deltas for token in delta.token_ids] == answer()[1:]
        (seam,) = stream.state.history.seams
        assert (seam.position, seam.before.worker_id, seam.after.worker_id) == (1, "p", "d")
        assert named(lines, "stream_crossed_class") == []


async def overtaken(num_repeated_tokens: int) -> list[Seam]:
    """Have decode's whole stream come before prefill's token, which decode repeats or has sampled itself."""
    first_came = asyncio.Event()
    prefill = ScriptedWorker("p", PREFILL, behave=after(first_came), numerics_class=ONE, exactness="layout")
    decode = ScriptedWorker("d", numerics_class=OTHER, exactness="layout")
    decode.num_repeated_tokens = num_repeated_tokens
    async with harness(prefill, decode) as here:
        stream = await here.dispatcher.submit(new_request())
        deltas = aiter(stream)
        tokens = list((await anext(deltas)).token_ids)
        first_came.set()
        assert tokens + [token async for delta in deltas for token in delta.token_ids] == answer()
        return stream.state.history.seams


async def test_a_token_of_prefill_that_decode_has_overtaken_is_of_no_class() -> None:
    assert await overtaken(num_repeated_tokens=0) == []


async def test_a_token_of_prefill_that_decode_repeats_first_is_of_prefills_class() -> None:
    (seam,) = await overtaken(num_repeated_tokens=1)
    assert (seam.position, seam.before.worker_id, seam.after.worker_id) == (1, "p", "d")
