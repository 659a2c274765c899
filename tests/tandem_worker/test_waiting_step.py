"""The outputs of steps that wait to leave are joined, and every choice's tokens stay as they were."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.v1 import types_pb2 as pb
from tandem_worker.waiting_step import _MAX_TOKENS, WaitingStep


def output(name: str, position: int, *token_ids: int, choice: int = 0, is_last: bool = False) -> pb.TokenOutput:
    logprobs = [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=each)) for each in token_ids]
    made = pb.TokenOutput(request_id=name, choice_index=choice, position=position, token_ids=token_ids)
    made.logprobs.extend(logprobs)
    if is_last:
        made.finish_reason = pb.FINISH_REASON_STOP
        made.ledger.num_generated_tokens = 9
    return made


def test_tokens_that_follow_on_are_one_output_with_their_logprobs_and_the_end() -> None:
    waiting = WaitingStep(1, [output("a", 5, 10), output("b", 7, 20)])
    assert waiting.add(2, [output("a", 6, 11, 12), output("c", 3, 30)])
    assert waiting.add(3, [output("a", 8, 13, is_last=True), output("c", 4, 31)])
    assert waiting.event.step == pb.StepBatch(
        step=3,
        outputs=[output("a", 5, 10, 11, 12, 13, is_last=True), output("b", 7, 20), output("c", 3, 30, 31)],
    )


def test_what_does_not_follow_on_is_an_output_of_its_own() -> None:
    """Decode repeats the token of prefill; another attempt or choice begins anew."""
    other = output("a", 6, 11)
    other.attempt = 1
    outputs = [output("a", 5, 10), output("a", 5, 10), other, output("a", 6, 11, choice=1)]
    waiting = WaitingStep(1, outputs[:1])
    for each in outputs[1:]:
        assert waiting.add(2, [each])
    assert list(waiting.event.step.outputs) == outputs
    assert waiting.add(3, [output("a", 6, 11)])
    assert waiting.event.step.outputs[1] == output("a", 5, 10, 11), "it follows the latest one"


def test_a_batch_is_bounded() -> None:
    waiting = WaitingStep(1, [output("a", 0, *range(_MAX_TOKENS - 1))])
    assert waiting.add(2, [output("a", _MAX_TOKENS - 1, 1)])
    before = pb.Event()
    before.CopyFrom(waiting.event)
    assert not waiting.add(3, [output("a", _MAX_TOKENS, 1)])
    assert waiting.event == before
    assert WaitingStep(1, [output("a", 0, *range(2 * _MAX_TOKENS))]).event.step.outputs, "a single step may be larger"


_STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 3)), max_size=4),
    min_size=1,
    max_size=30,
)


@given(_STEPS)
@settings(deadline=None)
def test_the_tokens_of_each_choice_are_the_same_and_in_order(steps: list[list[tuple[str, int, int]]]) -> None:
    sent: dict[tuple[str, int], list[int]] = defaultdict(list)
    waiting: WaitingStep | None = None
    for number, drawn in enumerate(steps):
        outputs = []
        for name, choice, num_tokens in drawn:
            tokens = sent[name, choice]
            outputs.append(output(name, len(tokens), *range(len(tokens), len(tokens) + num_tokens), choice=choice))
            tokens += range(len(tokens), len(tokens) + num_tokens)
        if waiting is None:
            waiting = WaitingStep(number, outputs)
        else:
            assert waiting.add(number, outputs)
    assert waiting is not None
    came: dict[tuple[str, int], list[int]] = defaultdict(list)
    for each in waiting.event.step.outputs:
        assert each.position == len(came[each.request_id, each.choice_index])
        assert [logprob.chosen.token_id for logprob in each.logprobs] == list(each.token_ids)
        came[each.request_id, each.choice_index] += each.token_ids
    assert came == sent
