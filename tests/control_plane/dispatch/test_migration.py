"""A stream outlives its worker."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import structlog.testing

from control_plane.accounts.identity import Caller
from control_plane.text.request import CompletionRequest, GenerationOptions
from control_plane.text.text_service import TextService
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import Draining, InternalError, TandemError, Unavailable
from tests.control_plane.api.model import OneModel, byte_level_tokenizer, description, ids_of
from tests.control_plane.harness import FULL, PROMPT, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    MODEL,
    PREFILL,
    AttachStream,
    Behaviour,
    ScriptedWorker,
    fail_after,
    finish,
    lose_after,
    only_accept,
    refuse_with,
    serve,
    silent,
    token_at,
)
from tests.tandem_worker.kv_harness import until


async def test_a_lost_decode_worker_costs_no_token() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(3)), ScriptedWorker("b")
    async with harness(ScriptedWorker("p", PREFILL), dying, heir) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        (moved,) = heir.submits
        assert list(moved.token_ids) == [*PROMPT, *answer(3)]
        assert moved.num_prompt_tokens == len(PROMPT) and not moved.HasField("handle")
        assert "release r-0" in here.kv.calls


@pytest.mark.parametrize(
    ("numerics_class", "is_exact"), [("cpu/float32/lean", True), ("cpu/float32/transformers-5-batch-dependent", False)]
)
async def test_a_move_is_flagged_where_rounding_depends_on_the_batch(numerics_class: str, is_exact: bool) -> None:
    dying = ScriptedWorker("a", behave=lose_after(3), numerics_class=numerics_class)
    heir = ScriptedWorker("b", numerics_class=numerics_class)
    async with harness(dying, heir) as here:
        with structlog.testing.capture_logs() as lines:
            assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        moves = [line for line in lines if line["event"] == "migration_accepted"]
        assert [(line["num_tokens"], line["is_exact"]) for line in moves] == [(3, is_exact)]


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_stream_moves_with_its_time_left_when_the_machines_clock_has_jumped(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, heir = ScriptedWorker("a", behave=only_accept), ScriptedWorker("b")
    async with harness(dying, heir) as here:
        stream = await here.dispatcher.submit(new_request())
        real_time = time.time
        monkeypatch.setattr(time, "time", lambda: real_time() + hours * 3600)
        dying.streams[0].events.put_nowait(None)
        assert await tokens_of(stream) == [answer()]
        assert 0 < heir.submits[0].time_left_ms <= 20_000


async def test_every_one_of_many_choices_survives_its_worker() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b")
    async with harness(dying, heir, queue_seconds=5) as here:
        assert await tokens_of(await here.dispatcher.submit(new_request(num_choices=6))) == [answer()] * 6


async def test_a_stream_pauses_until_its_only_worker_is_back() -> None:
    first = ScriptedWorker("d", behave=lose_after(2))
    async with harness(first, queue_seconds=10) as here:
        deltas = aiter(await here.dispatcher.submit(new_request()))
        assert [token for _ in range(2) for token in (await anext(deltas)).token_ids] == answer(2)
        await here.add(ScriptedWorker("d", life=1))
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[2:]


async def test_a_stream_pauses_while_the_worker_it_moves_to_is_full() -> None:
    dying, heir = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=refuse_with(FULL))
    async with harness(dying, heir, queue_seconds=10) as here:
        stream = asyncio.create_task(tokens_of(await here.dispatcher.submit(new_request())))
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        assert len(heir.submits) == 1, "nothing is sent again before the worker may have room"
        heir.behave = serve
        here.report(heir)
        assert await stream == [answer()]


async def test_a_stream_goes_back_to_its_worker_if_that_is_well_again_and_no_other_has_room() -> None:
    left, full = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=refuse_with(FULL))
    with structlog.testing.capture_logs() as logs:
        await _goes_back(left, full)
    events = [each["event"] for each in logs]
    assert events.count("migration_started") == 1, "it is one move, however often the stream looks for room"


async def _goes_back(left: ScriptedWorker, full: ScriptedWorker) -> None:
    async with harness(left, full, queue_seconds=10) as here:
        stream = asyncio.create_task(tokens_of(await here.dispatcher.submit(new_request())))
        await until(lambda: here.dispatcher.queue.num_waiting(MODEL) == 1)
        left.behave = serve

        def is_over() -> bool:
            here.report(left)  # each report lets the stream look
            return stream.done()

        await until(is_over)
        assert await stream == [answer()]
        assert len(left.submits) == 2 and len(full.submits) == 1


async def test_a_stream_that_cannot_go_on_ends_in_the_error_that_stopped_it() -> None:
    async with harness(ScriptedWorker("d", behave=fail_after(2, InternalError("out of luck")))) as here:
        stream = await here.dispatcher.submit(new_request())
        with pytest.raises(InternalError, match="out of luck"):
            await tokens_of(stream)


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind() -> None:
    dying, mute = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=silent)
    async with harness(dying, mute, queue_seconds=10) as here:
        stream = await here.dispatcher.submit(new_request())
        await mute.until(lambda mute: len(mute.submits) == 1)
        await stream.aclose()
        await mute.until(lambda mute: len(mute.cancels) == 1)
        await asyncio.gather(*here.dispatcher.background, return_exceptions=True)
        assert len(mute.submits) == 1


async def test_a_worker_that_contradicts_the_tokens_delivered_goes_on_from_those() -> None:
    """Prefill's first token was delivered; decode computes the prompt itself and samples another token."""

    async def contradict(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await asyncio.gather(first_came.wait())
        worker.behave = serve
        attach.tokens(submit, len(PROMPT), [7, 8])

    first_came = asyncio.Event()
    decode = ScriptedWorker("d", behave=contradict)
    async with harness(ScriptedWorker("p", PREFILL), decode, queue_seconds=5) as here:
        deltas = aiter(await here.dispatcher.submit(new_request()))
        assert (await anext(deltas)).token_ids == tuple(answer(1))
        first_came.set()
        assert [token async for delta in deltas for token in delta.token_ids] == answer()[1:]
        assert list(decode.submits[-1].token_ids) == [*PROMPT, *answer(1)]


async def test_stopping_a_choice_that_moves_does_not_end_the_others() -> None:
    """Either worker may be asked first: choice 0 fails where it begins, and is not answered where it would go on."""

    async def move_choice_zero(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        if submit.choice_index == 1:
            attach.accept(submit)
            await stopped.wait()
            await finish(worker, attach, submit)
        elif len(submit.token_ids) == len(PROMPT):
            attach.accept(submit)
            attach.tokens(submit, len(PROMPT), answer(1))
            attach.fail(submit, Unavailable("this one only"))
        else:
            moving.set()

    moving, stopped = asyncio.Event(), asyncio.Event()
    workers = (ScriptedWorker(name, behave=move_choice_zero) for name in "ab")
    async with harness(*workers, queue_seconds=5) as here:
        stream = await here.dispatcher.submit(new_request(num_choices=2))
        await moving.wait()
        stream.stop_choice(0)
        stopped.set()
        assert (await tokens_of(stream))[1] == answer()


async def test_a_choice_that_moves_takes_its_seed_and_what_its_penalties_count_along() -> None:
    """Penalties count the answer's tokens, from `num_prompt_tokens` on; noise depends on the absolute position."""
    dying, heir = ScriptedWorker("a", behave=fail_after(3, Unavailable("its engine died"))), ScriptedWorker("b")
    sampling = SamplingParams(max_tokens=5, temperature=0.7, min_tokens=4)
    sampling = msgspec.structs.replace(sampling, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.25)
    async with harness(dying, heir) as here:
        stream = await here.dispatcher.submit(new_request(num_choices=2, sampling=sampling, choice_seeds=(11, 22)))
        assert await tokens_of(stream) == [answer(), answer()]
        for index, seed in enumerate((11, 22)):
            (first,) = [submit for submit in dying.submits if submit.choice_index == index]
            (moved,) = [submit for submit in heir.submits if submit.choice_index == index]
            assert (moved.sampling.seed, moved.num_prompt_tokens) == (seed, len(PROMPT))
            assert moved.sampling == first.sampling
            assert list(moved.token_ids) == [*PROMPT, *answer(3)] and moved.attempt > first.attempt


async def test_each_token_has_its_own_log_probabilities_on_both_sides_of_a_move() -> None:
    async def send_three(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        first, end = len(submit.token_ids), len(PROMPT) + submit.sampling.max_tokens
        end = min(end, first + 3)
        chosen = [pb.TokenLogprob(token_id=token_at(place), logprob=-place, rank=1) for place in range(first, end)]
        logprobs = [pb.PositionLogprobs(chosen=one, top=[one]) for one in chosen]
        is_last = end == len(PROMPT) + submit.sampling.max_tokens
        last = {"finish_reason": pb.FINISH_REASON_LENGTH, "ledger": pb.PhaseLedger()} if is_last else {}
        attach.tokens(submit, first, [one.token_id for one in chosen], logprobs=logprobs, **last)
        if not is_last:
            attach.fail(submit, Unavailable("its engine died"))

    async with harness(ScriptedWorker("a", behave=send_three), ScriptedWorker("b", behave=send_three)) as here:
        deltas = [delta async for delta in await here.dispatcher.submit(new_request())]
        assert [token for delta in deltas for token in delta.token_ids] == answer()
        received = [position for delta in deltas for position in delta.logprobs]
        assert [(one.chosen.token_id, one.chosen.logprob) for one in received] == [
            (token, -float(len(PROMPT) + place)) for place, token in enumerate(answer())
        ]


async def test_a_stop_string_is_found_across_the_seam_and_its_beginning_never_leaves() -> None:
    ids = ids_of("Hello world, how are you today?")
    texts = [byte_level_tokenizer().decode([token_id]) for token_id in ids]
    num_before = next(place for place in range(1, len(ids)) if len("".join(texts[:place])) > len("Hello "))
    stop = "".join(texts[num_before - 1 : num_before + 2])

    def send(num_tokens: int) -> Behaviour:
        async def send_and_die(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
            attach.accept(submit)
            place = len(submit.token_ids) - submit.num_prompt_tokens
            attach.tokens(submit, len(submit.token_ids), ids[place : place + num_tokens])
            if place + num_tokens < len(ids):
                attach.fail(submit, Unavailable("its engine died"))

        return send_and_die

    workers = ScriptedWorker("a", behave=send(num_before)), ScriptedWorker("b", behave=send(len(ids)))
    async with harness(*workers) as here:
        service = TextService(OneModel(description(model_id=MODEL)), here.dispatcher)
        options = GenerationOptions(max_tokens=60, stop=(stop,))
        request = CompletionRequest("demo", tuple(range(40)), Caller("r"), options)
        deltas = [delta async for delta in await service.start(request)]
        expected = "".join(texts).partition(stop)[0]
        assert "".join(delta.text for delta in deltas) == expected
        assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_usage_counts_a_prompt_and_each_token_once_however_often_an_answer_moves(has_prefill: bool) -> None:
    """Tokens that the next worker finds cached were computed for this request: they are no saving."""

    async def find_all(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        ledger = pb.PhaseLedger(num_cached_tokens=len(submit.token_ids) - 1, num_computed_tokens=1)
        start = len(submit.token_ids)
        end = len(PROMPT) + 5
        tokens = [token_at(place) for place in range(start, end)]
        attach.tokens(submit, start, tokens, finish_reason=pb.FINISH_REASON_LENGTH, ledger=ledger)

    async def prefill_half(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        ledger = pb.PhaseLedger(num_cached_tokens=16, num_computed_tokens=24)
        attach.tokens(submit, len(PROMPT), answer(1), ledger=ledger)

    workers = [ScriptedWorker("a", behave=lose_after(3)), ScriptedWorker("b", behave=find_all)]
    workers += [ScriptedWorker("p", PREFILL, prefill_half)] * has_prefill
    async with harness(*workers) as here:
        stream = await here.dispatcher.submit(new_request())
        assert await tokens_of(stream) == [answer()]
        usage = stream.usage
        assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (len(PROMPT), 5)
        assert usage.num_cached_tokens == (16 if has_prefill else 0)


async def test_what_a_draining_worker_could_not_finish_goes_on_elsewhere_and_is_no_loss() -> None:
    async def drain(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        worker.behave = serve
        await fail_after(1, Draining("the worker stopped before the request was finished"))(worker, attach, submit)

    workers = [ScriptedWorker(name, behave=drain) for name in "abcdef"]
    async with harness(*workers, queue_seconds=5) as here:
        stream = await here.dispatcher.submit(new_request(max_tokens=9))
        assert await tokens_of(stream) == [answer(9)]
        assert stream.state.choices[0].num_losses == 0


def waits_for(prefill: str) -> Behaviour:
    """Return a decode worker that waits forever for this prefill worker's blocks, and serves all other requests."""

    async def wait(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        is_his = submit.handle.prefill_incarnation.startswith(f"{prefill}-")
        await (only_accept if is_his else serve)(worker, attach, submit)

    return wait


def accepts_until(started: asyncio.Event, lose: Behaviour) -> Behaviour:
    """Return a prefill worker that accepts, and is lost once all workers have accepted: `submit` has returned then."""

    async def accept(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await started.wait()
        await lose(worker, attach, submit)

    return accept


async def break_stream(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    attach.events.put_nowait(None)


def fail(error: TandemError) -> Behaviour:
    async def send(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.fail(submit, error)

    return send


@pytest.mark.parametrize("lose", [break_stream, fail(Draining("it leaves"))])
async def test_when_prefill_is_lost_another_reads_the_prompt(lose: Behaviour) -> None:
    started = asyncio.Event()
    first, second = ScriptedWorker("p", PREFILL, accepts_until(started, lose)), ScriptedWorker("q", PREFILL)
    decode = ScriptedWorker("d", behave=waits_for("p"))
    async with harness(first, second, decode, queue_seconds=5) as here:
        stream = await here.dispatcher.submit(new_request(num_choices=2))
        started.set()
        assert await tokens_of(stream) == [answer()] * 2
        assert (len(first.submits), len(second.submits)) == (1, 1)
        assert {
            submit.handle.handle_id for submit in decode.submits if submit.attempt == second.submits[0].attempt
        } == {second.submits[0].handle.handle_id}
        await decode.until(lambda decode: len(decode.cancels) == 2)
        assert here.kv.calls == ["release_all"]


async def test_when_prefill_is_lost_decode_reads_the_prompt_if_that_is_sooner() -> None:
    started = asyncio.Event()
    first, second = ScriptedWorker("p", PREFILL, accepts_until(started, break_stream)), ScriptedWorker("q", PREFILL)
    decode = ScriptedWorker("d", behave=waits_for("p"))
    async with harness(first, second, decode, queue_seconds=5, local_prefill="auto") as here:
        stream = await here.dispatcher.submit(new_request(is_probe=True))  # a probe is handed over at any cost
        await until(lambda: len(decode.submits) == 1)
        await stream.aclose()
        here.registry.register(second.info(), second.load(num_tokens_in_flight=10_000))
        here.registry.register(decode.info(), decode.load(num_running=4))
        stream = await here.dispatcher.submit(new_request(request_id="s"))
        started.set()
        await until(lambda: "abort" in here.kv.calls)
        assert len(second.submits) == 0
        await stream.aclose()


async def test_only_one_more_prefill_worker_is_tried() -> None:
    started = asyncio.Event()
    behave = accepts_until(started, fail(InternalError("a bug")))
    prefills = [ScriptedWorker(name, PREFILL, behave) for name in "pqr"]
    decode = ScriptedWorker("d", behave=only_accept)
    async with harness(*prefills, decode, queue_seconds=5) as here:
        stream = await here.dispatcher.submit(new_request())
        started.set()
        await until(lambda: "abort" in here.kv.calls)
        assert sorted(len(prefill.submits) for prefill in prefills) == [0, 1, 1]
        await stream.aclose()
