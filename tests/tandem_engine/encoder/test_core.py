"""Calls take turns, end once, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from tandem_engine.encoder.batch import EncoderInput, Values
from tandem_engine.encoder.core import EncoderCore
from tandem_engine.encoder.messages import (
    CancelTexts,
    EncoderInfo,
    EncoderStats,
    EncoderTask,
    EncodeTexts,
    TextInput,
    TextsEncoded,
    TextsRefused,
)

VOCAB_SIZE = 100
CONTEXT_LENGTH = 10


class SumEncoder:
    """Returns the sum of an input's token ids; records the batches. Token 99 gives NaN."""

    vocab_size = VOCAB_SIZE
    context_length = CONTEXT_LENGTH

    def __init__(self, task: EncoderTask = "text-embedding") -> None:
        self.info = EncoderInfo(task, 1, [], "mean", False, has_pairs=task != "text-embedding")
        self.batches: list[list[list[int]]] = []

    def encode(self, inputs: Sequence[EncoderInput]) -> Values:
        self.batches.append([each.token_ids.tolist() for each in inputs])
        sums = [np.nan if 99 in each.token_ids else float(each.token_ids.sum()) for each in inputs]
        return np.array(sums, np.float32).reshape(-1, 1)


def _core(encoder: SumEncoder, *, max_tokens: int = 4, max_calls: int = 8) -> EncoderCore:
    ticks = count(1)
    return EncoderCore(encoder, max_tokens, max_calls, clock=lambda: next(ticks))


def _text(*token_ids: int, num_first: int = 0) -> TextInput:
    return TextInput(np.array(token_ids, "<u4").tobytes(), num_first)


def _step(core: EncoderCore) -> list[Any]:
    events: list[Any] = []
    core.run_step(events.append)
    return events


def _drain(core: EncoderCore) -> list[Any]:
    events: list[Any] = []
    while core.has_work():
        events += _step(core)
    return events


def _assert_empty(core: EncoderCore) -> None:
    stats = core.stats()
    assert (len(core.queue), core.has_work()) == (0, False)
    assert (stats.num_waiting, stats.num_tokens_in_flight) == (0, 0)


def test_a_clock_that_jumps_back_makes_no_step_negative() -> None:
    unix, seconds = iter((10_000_000_000, 9_000_000_000)), iter((1_000_000_000, 3_000_000_000))
    core = EncoderCore(SumEncoder(), 4, 8, clock=lambda: next(unix), monotonic=lambda: next(seconds))
    core.handle_some(EncodeTexts(1, [_text(1, 1)]))
    assert _step(core)[-1].counters["step_seconds"] == 2.0


def test_fairness_keys_take_turns_input_by_input() -> None:
    encoder = SumEncoder()
    core = _core(encoder)
    core.handle_some(EncodeTexts(1, [_text(1, 1), _text(2, 2), _text(3, 3)], fairness_key="a"))
    core.handle_some(EncodeTexts(2, [_text(4, 4)], fairness_key="a"))
    core.handle_some(EncodeTexts(3, [_text(5, 5), _text(6, 6)], fairness_key="b"))
    answered = [event.key for event in _drain(core) if isinstance(event, TextsEncoded)]
    assert encoder.batches == [[[1, 1], [5, 5]], [[2, 2], [6, 6]], [[3, 3], [4, 4]]]
    assert answered == [3, 1, 2]
    _assert_empty(core)


def test_a_step_has_as_many_tokens_as_it_may_and_a_longer_input_goes_alone() -> None:
    encoder = SumEncoder()
    core = _core(encoder)
    core.handle_some(EncodeTexts(1, [_text(1), _text(2, 2, 2, 2, 2), _text(3, 3), _text(4, 4), _text(5)]))
    _drain(core)
    assert encoder.batches == [[[1]], [[2, 2, 2, 2, 2]], [[3, 3], [4, 4]], [[5]]]


def test_values_return_in_the_order_of_the_inputs_with_their_times() -> None:
    core = _core(SumEncoder())
    core.handle_some(EncodeTexts(7, [_text(1, 2), _text(3, 4), _text(5)]))
    (encoded,) = [event for event in _drain(core) if isinstance(event, TextsEncoded)]
    assert np.frombuffer(encoded.values, "<f4").tolist() == [3, 7, 5]
    # Steps took the times 1 to 2 and 3 to 4.
    assert (encoded.key, encoded.num_tokens, encoded.scheduled_ns, encoded.finished_ns) == (7, 5, 1, 4)


def test_a_cancelled_call_is_not_encoded_further_and_not_answered() -> None:
    encoder = SumEncoder()
    core = _core(encoder, max_tokens=2)
    # 1. The first of three inputs is encoded.
    core.handle_some(EncodeTexts(1, [_text(1, 1), _text(2, 2), _text(3, 3)]))
    core.handle_some(EncodeTexts(2, [_text(4, 4)]))
    (stats,) = _step(core)
    assert stats == EncoderStats(1, 1, 6, stats.counters, 8)
    # 2. The call is cancelled, twice, and so is one that was never here.
    for key in (1, 1, 55):
        core.handle_some(CancelTexts(key))
    # 3. The other call is answered; nothing is left.
    assert [event.key for event in _drain(core) if isinstance(event, TextsEncoded)] == [2]
    assert encoder.batches == [[[1, 1]], [[4, 4]]]
    assert core.stats().counters["cancelled_calls"] == 1
    _assert_empty(core)


def test_a_call_that_is_cancelled_while_it_waits_leaves_no_turn() -> None:
    core = _core(SumEncoder())
    core.handle_some(EncodeTexts(1, [_text(1)], fairness_key="a"))
    core.handle_some(CancelTexts(1))
    _assert_empty(core)


def test_a_full_queue_refuses_the_next_call() -> None:
    core = _core(SumEncoder(), max_calls=2)
    assert not [event for key in (1, 2) for event in core.handle_some(EncodeTexts(key, [_text(1)]))]
    (refused,) = core.handle_some(EncodeTexts(3, [_text(1)]))
    assert isinstance(refused, TextsRefused) and (refused.key, refused.reason) == (3, "full")
    assert "the limit is 2" in refused.message
    _drain(core)
    assert not core.handle_some(EncodeTexts(4, [_text(1)]))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], ["no inputs"]),
        ([_text(1), _text()], ["input 1", "no tokens"]),
        ([_text(*[1] * 11)], ["input 0", "11 tokens", "10", "shorten"]),
        ([_text(1, 100)], ["input 0", "100", "tokenizer"]),
        ([_text(1, 2, num_first=1)], ["input 0", "pair"]),
        ([TextInput(b"12345")], ["input 0", "5 bytes"]),
    ],
)
def test_a_call_that_cannot_be_done_names_the_input_the_value_and_the_limit(
    inputs: list[TextInput], words: list[str]
) -> None:
    core = _core(SumEncoder())
    (refused,) = core.handle_some(EncodeTexts(1, inputs))
    assert isinstance(refused, TextsRefused) and refused.reason == "invalid"
    assert all(word in refused.message for word in words), refused.message
    _assert_empty(core)


@pytest.mark.parametrize("num_first", [-1, 3, 4])
def test_the_first_text_of_a_pair_leaves_tokens_for_the_second(num_first: int) -> None:
    core = _core(SumEncoder("text-ranking"))
    (refused,) = core.handle_some(EncodeTexts(1, [_text(1, 2, 3, num_first=num_first)]))
    assert isinstance(refused, TextsRefused) and str(num_first) in refused.message
    assert not core.handle_some(EncodeTexts(2, [_text(1, 2, 3, num_first=2)]))


def test_a_model_with_a_head_takes_no_pooling() -> None:
    core = _core(SumEncoder("text-classification"))
    (refused,) = core.handle_some(EncodeTexts(1, [_text(1)], pooling="cls"))
    assert isinstance(refused, TextsRefused) and "text-classification" in refused.message


def test_values_that_are_not_finite_fail_their_call_alone() -> None:
    encoder = SumEncoder()
    core = _core(encoder)
    core.handle_some(EncodeTexts(1, [_text(99), _text(99), _text(1, 1, 1)], fairness_key="a"))
    core.handle_some(EncodeTexts(2, [_text(2)], fairness_key="b"))
    refused, encoded, _ = _drain(core)
    assert (refused.key, refused.reason, encoded.key) == (1, "failed", 2)
    assert "input 0" in refused.message
    assert encoder.batches == [[[99], [2], [99]]]
    _assert_empty(core)


def test_thousands_of_calls_leave_nothing() -> None:
    core = _core(SumEncoder(), max_calls=20)
    generator = np.random.default_rng(3)
    answered = 0
    for key in range(3000):
        texts = [_text(*[1] * int(generator.integers(1, 6))) for _ in range(int(generator.integers(1, 4)))]
        core.handle_some(EncodeTexts(key, texts, fairness_key=str(generator.integers(1000))))
        if generator.random() < 0.2:
            core.handle_some(CancelTexts(int(generator.integers(key + 1))))
        while len(core.queue) > 10:
            answered += sum(isinstance(event, TextsEncoded) for event in _step(core))
    answered += sum(isinstance(event, TextsEncoded) for event in _drain(core))
    assert answered == core.stats().counters["finished_calls"] > 2000
    assert answered + core.stats().counters["cancelled_calls"] == 3000
    _assert_empty(core)
    assert not core.queue._turns and not core.queue._calls
