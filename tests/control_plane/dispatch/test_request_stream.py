"""Each token is delivered once and in order, from any mixture of workers that send it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.dispatch.request_state import ChoiceState, Diverged, RequestState
from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.route_feedback import RouteFeedback
from control_plane.dispatch.submitter import DecodeSink, PrefillSink
from control_plane.dispatch.wakeups import WakeupScheduler
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_links import Report, WorkerLink
from control_plane.generation import TokenRequest
from control_plane.routing.cost_model import InFlight
from control_plane.routing.router import Router
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import Aborted, Cancelled, DeadlineExceeded, TandemError, Unavailable

PROMPT = (1, 2, 3)
NUM_TOKENS = 8
ANSWER = [100 + i for i in range(NUM_TOKENS)]


class RecordedLink:
    """A link that only records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.worker = Worker(pb.WorkerInfo(incarnation="w-1"), pb.LoadReport(), 0.0)

    def cancel(self, request_id: str, attempt: int, on_report: Report | None = None) -> None:
        self.calls.append("cancel")

    def forget(self, request_id: str, attempt: int) -> None:
        self.calls.append("forget")


class Events:
    """Records what a request reports to its dispatcher."""

    def __init__(self) -> None:
        self.failures: list[TandemError] = []
        self.num_finished = 0
        self.num_closed = 0

    def call_failed(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        self.failures.append(error)

    def finished(self, state: RequestState) -> None:
        self.num_finished += 1

    def closed(self, state: RequestState) -> None:
        self.num_closed += 1


def new_stream(
    num_choices: int = 1,
    seconds: float = 10.0,
    *,
    events: Events | None = None,
    wakeups: WakeupScheduler | None = None,
    max_unread_tokens: int = 8192,
) -> RequestStream:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    seeds = tuple(range(num_choices))
    request = TokenRequest("r", "me", "tiny", PROMPT, sampling, seeds, deadline=time.monotonic() + seconds)
    card = pb.ModelCard(model_id="tiny", block_size=16)
    return RequestStream(
        RequestState(request, card, None, events or Events(), wakeups=wakeups, max_unread_tokens=max_unread_tokens)
    )


def new_call(link: RecordedLink | None = None, choice_index: int | None = 0) -> WorkerCall:
    submit = pb.Submit(request_id="r-0")
    return WorkerCall(cast(WorkerLink, link or RecordedLink()), submit, InFlight().add("w-1"), choice_index)


def feedback() -> RouteFeedback:
    registry = WorkerRegistry(3.0, 5.0)
    return RouteFeedback(registry, Router(registry))


def decode_sink(state: RequestState, choice: ChoiceState, call: WorkerCall) -> DecodeSink:
    return DecodeSink(state, choice, call, feedback())


def output(first: int, end: int, **fields: Any) -> pb.TokenOutput:
    """Tokens `first` to `end` of the answer."""
    if end == NUM_TOKENS:
        fields = {"finish_reason": pb.FINISH_REASON_LENGTH, **fields}
    return pb.TokenOutput(request_id="r-0", position=len(PROMPT) + first, token_ids=ANSWER[first:end], **fields)


@st.composite
def outputs(draw: st.DrawFn) -> list[pb.TokenOutput]:
    """Send the answer from several workers in turn; each begins at any known position, the last reaches the end."""
    sent: list[pb.TokenOutput] = []
    num_known = 0
    while num_known < NUM_TOKENS:
        position = num_known - draw(st.integers(0, num_known))
        for num_held_back in draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)):
            end = min(NUM_TOKENS, position + 5 - num_held_back)
            if end > position:
                sent.append(output(position, end))
            position = end
        num_known = max(num_known, position)
    return sent


@given(outputs(), st.integers(0, 20))
def test_any_mixture_of_prefill_decode_and_migrated_outputs_gives_each_token_once_in_order(
    sent: list[pb.TokenOutput], prefill_comes_at: int
) -> None:
    async def run() -> list[int]:
        stream = new_stream()
        (choice,) = stream.state.choices
        prefill = PrefillSink(stream.state, new_call(choice_index=None), feedback())
        decode = decode_sink(stream.state, choice, new_call())
        for index, one in enumerate(sent):
            if index == prefill_comes_at:
                prefill.output(output(0, 1, ledger=pb.PhaseLedger()))
            decode.output(one)
        return [token async for delta in stream for token in delta.token_ids]

    assert asyncio.run(run()) == ANSWER


@given(st.integers(0, NUM_TOKENS - 1), st.integers(1, 3))
def test_tokens_that_contradict_or_leave_a_gap_are_never_passed_on(num_known: int, distance: int) -> None:
    async def run() -> None:
        stream = new_stream()
        (choice,) = stream.state.choices
        if num_known:
            stream.state.receive(choice, output(0, num_known))
            with pytest.raises(Diverged):
                stream.state.receive(choice, pb.TokenOutput(position=len(PROMPT) + num_known - 1, token_ids=[5, 6]))
        with pytest.raises(Diverged):
            stream.state.receive(choice, pb.TokenOutput(position=len(PROMPT) + num_known + distance, token_ids=[5]))
        with pytest.raises(Diverged):
            stream.state.receive(choice, pb.TokenOutput(position=len(PROMPT) - 1, token_ids=[3]))
        assert choice.tokens == ANSWER[:num_known]

    asyncio.run(run())


async def test_a_stopped_choice_delivers_and_bills_nothing_more() -> None:
    stream, link = new_stream(num_choices=2), RecordedLink()
    stream.state.call_started(new_call(link))
    stream.state.receive(stream.state.choices[0], output(0, 2))
    stream.state.receive(stream.state.choices[1], output(0, NUM_TOKENS))
    stream.state.receive(stream.state.choices[0], output(2, 5))
    deltas = aiter(stream)
    assert [(await anext(deltas)).token_ids for _ in range(2)] == [(token_id,) for token_id in ANSWER[:2]]
    stream.stop_choice(0)
    assert [(delta.choice_index, len(delta.token_ids)) async for delta in deltas] == [(1, 1)] * NUM_TOKENS
    assert stream.usage.num_completion_tokens == 2 + NUM_TOKENS
    assert link.calls == ["cancel"]


async def test_tokens_that_came_together_are_delivered_and_billed_one_by_one() -> None:
    """Otherwise a stop string within a draft would bill tokens that plain decoding would not."""
    stream = new_stream()
    (choice,) = stream.state.choices
    logprobs = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token, rank=1)) for token in ANSWER[:3]]
    stream.state.receive(choice, output(0, 3, finish_reason=pb.FINISH_REASON_LENGTH, logprobs=logprobs))
    deltas = aiter(stream)
    first = await anext(deltas)
    assert (first.token_ids, first.finish_reason) == ((ANSWER[0],), None)
    assert [each.chosen.token_id for each in first.logprobs] == [ANSWER[0]]
    assert stream.usage.num_completion_tokens == 1
    rest = [await anext(deltas), await anext(deltas)]
    assert [each.token_ids for each in rest] == [(ANSWER[1],), (ANSWER[2],)]
    assert [each.finish_reason for each in rest] == [None, "length"]
    assert stream.usage.num_completion_tokens == 3
    await stream.aclose()


async def test_silence_until_the_deadline_is_an_error() -> None:
    stream = new_stream(seconds=-1.0)
    with pytest.raises(DeadlineExceeded):
        await anext(aiter(stream))


async def test_closing_twice_ends_once() -> None:
    events = Events()
    stream = new_stream(events=events)
    await stream.aclose()
    await stream.aclose()
    assert events.num_closed == 1


async def test_a_call_gives_its_tokens_back_once_and_frees_who_waits_for_its_first_word() -> None:
    in_flight, link = InFlight(), RecordedLink()
    entry = in_flight.add("w", num_prefill_tokens=5, num_decode_tokens=7)
    call = WorkerCall(cast(WorkerLink, link), pb.Submit(), entry, choice_index=0)
    assert (in_flight.decode_tokens["w"], in_flight.prefill_tokens["w"]) == (7, 5)
    call.output_began()
    assert in_flight.total() == 7
    call.close(cancel=True)
    call.close(cancel=True)
    with pytest.raises(Cancelled):
        await call.answered
    assert (link.calls, in_flight.total(), dict(in_flight.decode_tokens)) == (["cancel"], 0, {})


async def test_the_first_word_is_a_refusal_and_later_ones_are_failures() -> None:
    events = Events()
    state = new_stream(events=events).state
    call = new_call()
    sink = decode_sink(state, state.choices[0], call)
    sink.accepted()
    sink.ended(Unavailable("lost"))
    assert len(events.failures) == 1 and not call.is_open
    refused = new_call()
    decode_sink(state, state.choices[0], refused).ended(Unavailable("full"))
    assert len(events.failures) == 1
    with pytest.raises(Unavailable, match="full"):
        await refused.answered


async def test_prompt_tokens_are_counted_once_as_computed_or_cached() -> None:
    stream = new_stream()
    stream.state.prefill_ledger_received(pb.PhaseLedger(num_computed_tokens=1, num_cached_tokens=2))
    ledger = pb.PhaseLedger(num_cached_tokens=3)
    stream.state.choice_ledger_received(stream.state.choices[0], ledger, is_fresh=False)
    assert (stream.usage.num_computed_tokens, stream.usage.num_cached_tokens) == (1, 2)


async def test_what_has_come_is_passed_on_together_and_an_error_behind_it() -> None:
    stream = new_stream()
    (choice,) = stream.state.choices
    stream.state.receive(choice, output(0, 2))
    stream.state.receive(choice, output(2, 3))
    stream.state.fail(Unavailable("gone"))
    batches = stream.batches()
    assert [delta.token_ids for delta in await anext(batches)] == [(token_id,) for token_id in ANSWER[:3]]
    with pytest.raises(Unavailable, match="gone"):
        await anext(batches)


async def test_of_a_batch_counts_what_was_taken_before_the_choice_was_stopped() -> None:
    stream = new_stream()
    stream.state.receive(stream.state.choices[0], output(0, 5))
    taken: list[int] = []
    async for batch in stream.batches():
        for delta in batch:
            taken += delta.token_ids
            if len(taken) == 2:
                stream.stop_choice(0)
    assert taken == ANSWER[:2] and stream.usage.num_completion_tokens == 2


async def test_a_client_that_reads_too_slowly_is_told_so_and_its_workers_are_let_go() -> None:
    events = Events()
    stream = new_stream(events=events, max_unread_tokens=3)
    (choice,) = stream.state.choices
    batches = stream.batches()
    stream.state.receive(choice, output(0, 2))
    assert len(list(await anext(batches))) == 2
    stream.state.receive(choice, output(2, 5))
    assert not events.num_closed  # three may wait
    stream.state.receive(choice, output(5, 6))
    assert events.num_closed and choice.is_over
    stream.state.receive(choice, output(6, 7))
    assert [token_id for delta in await anext(batches) for token_id in delta.token_ids] == ANSWER[2:6]
    with pytest.raises(
        Aborted, match=r"4 tokens of this answer are waiting .* no more than 3 may; .*--max-unread-tokens"
    ):
        await anext(batches)
    assert stream.usage.num_completion_tokens == 6


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_what_goes_wrong_behind_the_end_of_an_answer_does_not_spoil_it(is_stopped: bool) -> None:
    events = Events()
    stream = new_stream(events=events, max_unread_tokens=3)
    (choice,) = stream.state.choices
    batches = stream.batches()
    stream.state.receive(choice, output(0, 6 if is_stopped else NUM_TOKENS))  # too many for a client that reads so late
    tokens: list[int] = []
    for delta in await anext(batches):
        tokens += delta.token_ids
        if is_stopped and len(tokens) == 2:
            stream.stop_choice(0)
    assert tokens == (ANSWER[:2] if is_stopped else ANSWER)
    assert await anext(batches, None) is None and events.num_finished
