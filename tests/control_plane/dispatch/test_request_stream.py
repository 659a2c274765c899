"""Is each token delivered once and in order, whoever sends it and however often?"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.dispatch.request_stream import ChoiceSink, Diverged, Flight, PrefillSink
from control_plane.dispatch.worker_call import Leg, counted
from control_plane.fleet.worker_links import WorkerLink
from control_plane.generation import TokenRequest
from control_plane.routing.estimates import InFlight
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_runtime.errors import Aborted, Cancelled, DeadlineExceeded, TandemError, Unavailable

PROMPT = (1, 2, 3)
NUM_TOKENS = 8
ANSWER = [100 + i for i in range(NUM_TOKENS)]


class Line:
    """A link that only notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def cancel(self, request_id: str, attempt: int) -> None:
        self.told.append("cancel")

    def forget(self, request_id: str, attempt: int) -> None:
        self.told.append("forget")


def new_flight(num_choices: int = 1, seconds: float = 10.0) -> Flight:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    seeds = tuple(range(num_choices))
    return Flight(TokenRequest("r", "me", "tiny", PROMPT, sampling, seeds, deadline=time.time() + seconds))


def new_leg(line: Line | None = None) -> Leg:
    return Leg(cast(WorkerLink, line or Line()), pb.Submit(request_id="r-0"), lambda: None)


def output(first: int, end: int, **fields: Any) -> pb.TokenOutput:
    """Tokens `first` to `end` of the answer."""
    if end == NUM_TOKENS:
        fields = {"finish_reason": pb.FINISH_REASON_LENGTH, **fields}
    return pb.TokenOutput(request_id="r-0", position=len(PROMPT) + first, token_ids=ANSWER[first:end], **fields)


@st.composite
def tellings(draw: st.DrawFn) -> list[pb.TokenOutput]:
    """Tell the answer by several workers in turn: each begins anywhere in what is known, the last tells the end."""
    told: list[pb.TokenOutput] = []
    num_known = 0
    while num_known < NUM_TOKENS:
        position = num_known - draw(st.integers(0, num_known))
        for num_held_back in draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)):
            end = min(NUM_TOKENS, position + 5 - num_held_back)
            if end > position:
                told.append(output(position, end))
            position = end
        num_known = max(num_known, position)
    return told


@given(tellings(), st.integers(0, 20))
def test_any_mixture_of_prefill_decode_and_migrated_outputs_gives_each_token_once_in_order(
    told: list[pb.TokenOutput], prefill_comes_at: int
) -> None:
    async def run() -> list[int]:
        flight = new_flight()
        (choice,) = flight.choices
        prefill = PrefillSink(flight, new_leg(), lambda error: None)
        decode = ChoiceSink(flight, choice, new_leg(), lambda choice, leg, error: None)
        for index, one in enumerate(told):
            if index == prefill_comes_at:
                prefill.output(output(0, 1, ledger=pb.PhaseLedger()))
            decode.output(one)
        return [token async for delta in flight for token in delta.token_ids]

    assert asyncio.run(run()) == ANSWER


@given(st.integers(0, NUM_TOKENS - 1), st.integers(1, 3))
def test_tokens_that_contradict_or_leave_a_gap_are_never_passed_on(num_known: int, distance: int) -> None:
    async def run() -> None:
        flight = new_flight()
        (choice,) = flight.choices
        if num_known:
            flight.take(choice, output(0, num_known))
            with pytest.raises(Diverged):
                flight.take(choice, pb.TokenOutput(position=len(PROMPT) + num_known - 1, token_ids=[5, 6]))
        with pytest.raises(Diverged):
            flight.take(choice, pb.TokenOutput(position=len(PROMPT) + num_known + distance, token_ids=[5]))
        with pytest.raises(Diverged):
            flight.take(choice, pb.TokenOutput(position=len(PROMPT) - 1, token_ids=[3]))
        assert choice.tokens == ANSWER[:num_known]

    asyncio.run(run())


async def test_a_stopped_choice_delivers_and_bills_nothing_more() -> None:
    flight, line = new_flight(num_choices=2), Line()
    flight.choices[0].leg = new_leg(line)
    flight.take(flight.choices[0], output(0, 2))
    flight.take(flight.choices[1], output(0, NUM_TOKENS))
    flight.take(flight.choices[0], output(2, 5))
    deltas = aiter(flight)
    assert [(await anext(deltas)).token_ids for _ in range(2)] == [(token_id,) for token_id in ANSWER[:2]]
    flight.stop_choice(0)
    assert [(delta.choice_index, len(delta.token_ids)) async for delta in deltas] == [(1, 1)] * NUM_TOKENS
    assert flight.usage.num_completion_tokens == 2 + NUM_TOKENS
    assert line.told == ["cancel"]


async def test_tokens_that_came_together_are_delivered_and_billed_one_by_one() -> None:
    """Else a stop string within what was guessed ahead would bill tokens that plain decoding would not."""
    flight = new_flight()
    (choice,) = flight.choices
    logprobs = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token, rank=1)) for token in ANSWER[:3]]
    flight.take(choice, output(0, 3, finish_reason=pb.FINISH_REASON_LENGTH, logprobs=logprobs))
    deltas = aiter(flight)
    first = await anext(deltas)
    assert (first.token_ids, first.finish_reason) == ((ANSWER[0],), None)
    assert [each.chosen.token_id for each in first.logprobs] == [ANSWER[0]]
    assert flight.usage.num_completion_tokens == 1
    rest = [await anext(deltas), await anext(deltas)]
    assert [each.token_ids for each in rest] == [(ANSWER[1],), (ANSWER[2],)]
    assert [each.finish_reason for each in rest] == [None, "length"]
    assert flight.usage.num_completion_tokens == 3
    await flight.aclose()


async def test_silence_until_the_deadline_is_an_error() -> None:
    flight = new_flight(seconds=-1.0)
    with pytest.raises(DeadlineExceeded):
        await anext(aiter(flight))


async def test_closing_twice_ends_once() -> None:
    flight, closed = new_flight(), []
    flight.on_close = lambda: closed.append(1)
    await flight.aclose()
    await flight.aclose()
    assert closed == [1]


async def test_a_leg_gives_its_tokens_back_once_and_frees_who_waits_for_its_first_word() -> None:
    in_flight, line = InFlight(), Line()
    give_back, prompt_read = counted(in_flight.decode_tokens, "w", 7), counted(in_flight.prefill_tokens, "w", 5)
    leg = Leg(cast(WorkerLink, line), pb.Submit(), give_back, prompt_read)
    assert (in_flight.decode_tokens["w"], in_flight.prefill_tokens["w"]) == (7, 5)
    leg.prompt_read()
    assert in_flight.total() == 7
    leg.close(cancel=True)
    leg.close(cancel=True)
    with pytest.raises(Cancelled):
        await leg.answered
    assert (line.told, in_flight.total(), dict(in_flight.decode_tokens)) == (["cancel"], 0, {})


async def test_the_first_word_is_a_refusal_and_later_ones_are_failures() -> None:
    failures: list[TandemError] = []
    flight = new_flight()
    leg = new_leg()
    sink = ChoiceSink(flight, flight.choices[0], leg, lambda choice, leg, error: failures.append(error))
    sink.accepted()
    sink.ended(Unavailable("lost"))
    assert len(failures) == 1 and not leg.is_open
    refused = new_leg()
    ChoiceSink(flight, flight.choices[0], refused, lambda *args: failures.append(args[2])).ended(Unavailable("full"))
    assert len(failures) == 1
    with pytest.raises(Unavailable, match="full"):
        await refused.answered


async def test_prompt_tokens_are_counted_once_as_computed_or_cached() -> None:
    flight = new_flight()
    flight.prefill_ended(pb.PhaseLedger(num_computed_tokens=1, num_cached_tokens=2))
    flight.choices[0].ledger = pb.PhaseLedger(num_cached_tokens=3)
    assert (flight.usage.num_computed_tokens, flight.usage.num_cached_tokens) == (1, 2)


async def test_what_has_come_is_passed_on_together_and_an_error_behind_it() -> None:
    flight = new_flight()
    (choice,) = flight.choices
    flight.take(choice, output(0, 2))
    flight.take(choice, output(2, 3))
    flight.fail(Unavailable("gone"))
    batches = flight.batches()
    assert [delta.token_ids for delta in await anext(batches)] == [(token_id,) for token_id in ANSWER[:3]]
    with pytest.raises(Unavailable, match="gone"):
        await anext(batches)


async def test_of_a_batch_counts_what_was_taken_before_the_choice_was_stopped() -> None:
    flight = new_flight()
    flight.take(flight.choices[0], output(0, 5))
    taken: list[int] = []
    async for batch in flight.batches():
        for delta in batch:
            taken += delta.token_ids
            if len(taken) == 2:
                flight.stop_choice(0)
    assert taken == ANSWER[:2] and flight.usage.num_completion_tokens == 2


async def test_a_client_that_reads_too_slowly_is_told_so_and_its_workers_are_let_go() -> None:
    closed = []
    flight = Flight(new_flight().request, max_unread_tokens=3)
    (choice,) = flight.choices
    flight.on_close = lambda: closed.append(True)
    batches = flight.batches()
    flight.take(choice, output(0, 2))
    assert len(list(await anext(batches))) == 2
    flight.take(choice, output(2, 5))
    assert not closed  # three may wait
    flight.take(choice, output(5, 6))
    assert closed and choice.is_over
    flight.take(choice, output(6, 7))
    assert [token_id for delta in await anext(batches) for token_id in delta.token_ids] == ANSWER[2:6]
    with pytest.raises(
        Aborted, match=r"4 tokens of this answer are waiting .* no more than 3 may; .*--max-unread-tokens"
    ):
        await anext(batches)
    assert flight.usage.num_completion_tokens == 6


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_what_goes_wrong_behind_the_end_of_an_answer_does_not_spoil_it(is_stopped: bool) -> None:
    flight = Flight(new_flight().request, max_unread_tokens=3)
    finished = []
    flight.on_finished = lambda: finished.append(True)
    (choice,) = flight.choices
    batches = flight.batches()
    flight.take(choice, output(0, 6 if is_stopped else NUM_TOKENS))  # too many for a client that reads so late
    tokens: list[int] = []
    for delta in await anext(batches):
        tokens += delta.token_ids
        if is_stopped and len(tokens) == 2:
            flight.stop_choice(0)
    assert tokens == (ANSWER[:2] if is_stopped else ANSWER)
    assert await anext(batches, None) is None and finished
