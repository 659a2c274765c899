"""What is guessed from a request's own text and from earlier answers, and by whom may those be read?"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem_engine.messages import Mode
from tandem_engine.scheduling.block_hash import BlockHash, hash_root
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_engine.scheduling.speculation.drafters import EarlierAnswers, OwnText
from tandem_engine.scheduling.speculation.ngrams import CHANGED, FIRM, MOST_AGREED, UNSEEN, NGramIndex, TokenBytes
from tests.tandem_engine.scheduling.harness import ROOT

OTHER_ROOT = hash_root(b"model", 4, "", b"another account")


def request_of(prompt: Sequence[int], answer: Sequence[int] = (), root: BlockHash | None = ROOT) -> Request:
    request = Request("r", [*prompt, *answer], len(prompt), SamplingParams(64), hash_root=root)
    request.num_generated_tokens = len(answer)
    return request


def test_what_followed_the_last_three_tokens_before_is_guessed() -> None:
    guess = OwnText().guess(request_of([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]), 2)
    assert guess is not None
    assert (list(guess.token_ids), guess.num_agreed, list(guess.firmness)) == ([5, 6], 3, [UNSEEN, UNSEEN])


def test_two_tokens_do_and_one_where_three_never_stood_before() -> None:
    pair = OwnText().guess(request_of([1, 2, 3, 4, 9, 2, 3]), 1)
    single = OwnText().guess(request_of([1, 2, 3, 4, 9, 8, 3]), 1)
    assert pair is not None and (list(pair.token_ids), pair.num_agreed) == ([4], 2)
    assert single is not None and (list(single.token_ids), single.num_agreed) == ([4], 1)
    assert OwnText().guess(request_of([1, 2, 3, 4]), 1) is None


def test_of_several_places_the_one_that_agrees_longest_counts_and_of_equals_the_latest() -> None:
    guess = OwnText().guess(request_of([7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3]), 1)
    assert guess is not None and (list(guess.token_ids), guess.num_agreed) == ([50], 4)
    guess = OwnText().guess(request_of([1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]), 1)
    assert guess is not None and list(guess.token_ids) == [60]


def test_what_repeats_itself_is_guessed_to_go_on_repeating() -> None:
    guess = OwnText().guess(request_of([1, 2, 3, 1, 2, 3, 1, 2]), 8)
    assert guess is not None and list(guess.token_ids) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert len(guess.firmness) == 8


def test_a_text_is_searched_as_it_grows() -> None:
    drafter, request = OwnText(), request_of([1, 2, 3, 4])
    assert drafter.guess(request, 1) is None
    request.token_ids += [9, 2, 3]
    guess = drafter.guess(request, 1)
    assert guess is not None and list(guess.token_ids) == [4]
    drafter.forget(request)
    assert not drafter._texts


def test_bytes_that_straddle_two_tokens_are_no_match() -> None:
    text = [0x01000000, 0x00000002, 0x02010000, 5, 0x00000201, 7, 8, 0x00000201]
    match = TokenBytes().find(text)
    assert match is not None and match.end == 5


@pytest.mark.parametrize("seed", range(5))
def test_both_searches_find_what_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    text: list[int] = []
    index, as_bytes = NGramIndex(), TokenBytes()
    for _ in range(300):
        text.append(rng.randrange(6))
        index.extend(text, len(text) - 1)
        expected = _longest(text)
        for match in (as_bytes.find(text), index.find(text, text)):
            if len(text) < 3:
                continue
            if expected is None:
                assert match is None
            else:
                assert match is not None
                assert match.num_agreed == _agreed(text, match.end)
                assert min(match.num_agreed, 3) == min(expected, 3)


def _longest(text: list[int]) -> int | None:
    return max((_agreed(text, end) for end in range(1, len(text))), default=0) or None


def _agreed(text: list[int], end: int) -> int:
    lengths = (n for n in range(min(end, MOST_AGREED), 0, -1) if text[end - n : end] == text[len(text) - n :])
    return next(lengths, 0)


def test_the_index_knows_what_always_follows_a_pair_from_what_changes() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7]
    index = NGramIndex()
    index.extend(text, len(text) - 1)
    assert [index.firmness[place] for place in (2, 6, 7, 10)] == [UNSEEN, FIRM, CHANGED, CHANGED]


def test_an_earlier_answer_is_guessed_again_up_to_its_end() -> None:
    answers = EarlierAnswers()
    answers.forget(request_of([1, 2, 3, 4], [50, 51, 52]))
    answers.forget(request_of([1, 2, 3, 5], [60, 61]))
    guess = answers.guess(request_of([1, 2, 3, 4], [50]), 8)
    assert guess is not None and list(guess.token_ids) == [51, 52]
    assert answers.guess(request_of([7, 7, 7, 7]), 8) is None


def test_the_latest_answer_wins() -> None:
    answers = EarlierAnswers()
    for token_id in (50, 60, 70):
        answers.forget(request_of([1, 2, 3], [token_id, 99, 98]))
    guess = answers.guess(request_of([1, 2, 3]), 2)
    assert guess is not None and list(guess.token_ids) == [70, 99]


def test_no_account_sees_what_another_was_answered() -> None:
    answers = EarlierAnswers()
    answers.forget(request_of([1, 2, 3], [50, 51, 52], ROOT))
    assert answers.guess(request_of([1, 2, 3], root=OTHER_ROOT), 4) is None
    assert answers.guess(request_of([1, 2, 3], root=None), 4) is None
    assert answers.guess(request_of([1, 2, 3], root=ROOT), 4) is not None


@pytest.mark.parametrize("bound", [0, 3])
def test_who_may_not_use_all_of_the_cache_neither_reads_nor_leaves_answers(bound: int) -> None:
    answers = EarlierAnswers()
    leaving = request_of([1, 2, 3], [50, 51])
    leaving.max_left_blocks = bound
    answers.forget(leaving)
    assert answers.num_tokens == 0
    answers.forget(request_of([1, 2, 3], [50, 51], None))
    assert answers.num_tokens == 0
    answers.forget(request_of([1, 2, 3], [50, 51]))
    reading = request_of([1, 2, 3])
    reading.max_found_blocks = bound
    assert answers.guess(reading, 4) is None


@pytest.mark.parametrize("mode", ["aggregated", "decode", "prefill"])
def test_prompts_without_answers_are_not_kept(mode: Mode) -> None:
    answers = EarlierAnswers()
    request = request_of([1, 2, 3], [50] if mode == "prefill" else [])
    request.mode = mode
    answers.forget(request)
    assert answers.num_tokens == 0


def test_so_many_tokens_are_kept_and_the_account_served_longest_ago_goes_first() -> None:
    answers = EarlierAnswers(max_tokens=20)
    answers.forget(request_of([1, 2, 3], [50, 51, 52], ROOT))
    answers.forget(request_of([1, 2, 3], [60, 61, 62], OTHER_ROOT))
    answers.forget(request_of([1, 2, 3], [70, 71, 72], OTHER_ROOT))
    assert answers.num_tokens == 14
    assert answers.guess(request_of([1, 2, 3], root=ROOT), 1) is None
    guess = answers.guess(request_of([1, 2, 3], root=OTHER_ROOT), 1)
    assert guess is not None and list(guess.token_ids) == [70]


def test_a_long_text_is_taken_in_by_and_by() -> None:
    answers = EarlierAnswers()
    answers.forget(request_of([1, 2, 3], range(100, 700)))
    reading = request_of([100, 101, 102])
    assert [answers.guess(reading, 1) is None for _ in range(4)] == [True, True, False, False]


def test_texts_agree_by_whole_tokens_from_their_ends() -> None:
    rng, agreed = random.Random(3), set()
    for _ in range(300):
        text = [rng.choice((1, 257, 65793)) for _ in range(rng.randrange(2, 40))]  # alike in most bytes
        if match := TokenBytes().find(text):
            before, most = text[: match.end], min(MOST_AGREED, match.end)
            assert match.num_agreed == next((n for n in range(most) if before[-1 - n] != text[-1 - n]), most)
            agreed.add(match.num_agreed)
    assert len(agreed) > 3
