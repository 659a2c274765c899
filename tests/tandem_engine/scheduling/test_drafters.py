"""Tests the drafts from a request's own text and from earlier answers, and who may read those answers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from tandem_engine.messages import Mode
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, hash_root
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.drafters import (
    MAX_MATCH_TOKENS,
    Agreement,
    EarlierAnswers,
    OwnText,
    find_matches,
)
from tests.tandem_engine.scheduling.harness import ROOT

OTHER_ROOT = hash_root(b"model", 4, "", b"another account")


def match_in(text: Sequence[int]) -> tuple[int, int] | None:
    """Return where the end of a text was before in the text."""
    data = array("I", text).tobytes()
    return next(iter(find_matches(data, data, len(data) - 1)), None)


def request_of(prompt: Sequence[int], answer: Sequence[int] = (), root: BlockHash | None = ROOT) -> Request:
    request = Request("r", [*prompt, *answer], len(prompt), SamplingParams(64), hash_root=root)
    request.num_generated_tokens = len(answer)
    return request


def test_what_followed_the_last_three_tokens_before_is_drafted() -> None:
    draft = OwnText().draft(request_of([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]), 2)
    assert draft is not None
    assert (list(draft.token_ids), draft.num_matched) == ([5, 6], 3)


def test_two_tokens_do_and_one_where_three_never_stood_before() -> None:
    pair = OwnText().draft(request_of([1, 2, 3, 4, 9, 2, 3]), 1)
    single = OwnText().draft(request_of([1, 2, 3, 4, 9, 8, 3]), 1)
    assert pair is not None and (list(pair.token_ids), pair.num_matched) == ([4], 2)
    assert single is not None and (list(single.token_ids), single.num_matched) == ([4], 1)
    assert OwnText().draft(request_of([1, 2, 3, 4]), 1) is None


def test_of_several_places_the_one_that_agrees_longest_counts_and_of_equals_the_latest() -> None:
    draft = OwnText().draft(request_of([7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3]), 1)
    assert draft is not None and (list(draft.token_ids), draft.num_matched) == ([50], 4)
    draft = OwnText().draft(request_of([1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]), 1)
    assert draft is not None and list(draft.token_ids) == [60]


def test_a_token_knows_whether_the_other_places_agree_up_to_it() -> None:
    text = [1, 2, 3, 50, 60, 70, 80, 9, 1, 2, 3, 50, 61, 7, 1, 2, 3, 50, 60, 71, 8, 1, 2, 3]
    draft = OwnText().draft(request_of(text), 4)
    assert draft is not None and list(draft.token_ids) == [50, 60, 71, 8]
    assert draft.agreements == [Agreement.ALL, Agreement.SOME, Agreement.NONE, Agreement.ALONE]
    draft = OwnText().draft(request_of([1, 2, 3, 4, 5, 9, 1, 2, 3]), 2)
    assert draft is not None and draft.agreements == [Agreement.ALONE] * 2


def test_what_repeats_itself_is_drafted_to_go_on_repeating() -> None:
    draft = OwnText().draft(request_of([1, 2, 3, 1, 2, 3, 1, 2]), 8)
    assert draft is not None and list(draft.token_ids) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_a_text_is_searched_as_it_grows() -> None:
    drafter, request = OwnText(), request_of([1, 2, 3, 4])
    assert drafter.draft(request, 1) is None
    request.token_ids += [9, 2, 3]
    draft = drafter.draft(request, 1)
    assert draft is not None and list(draft.token_ids) == [4]
    drafter.forget(request)
    assert not drafter._texts


def test_bytes_that_straddle_two_tokens_are_no_match() -> None:
    text = [0x01000000, 0x00000002, 0x02010000, 5, 0x00000201, 7, 8, 0x00000201]
    match = match_in(text)
    assert match is not None and match[0] == 5


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_a_plain_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    text: list[int] = []
    for _ in range(300):
        text.append(rng.randrange(6))
        expected, match = _longest(text), match_in(text)
        if expected is None:
            assert match is None
        else:
            assert match is not None
            end, num_matched = match
            assert num_matched == _agreed(text, end)
            assert min(num_matched, 3) == min(expected, 3)


def _longest(text: list[int]) -> int | None:
    return max((_agreed(text, end) for end in range(1, len(text))), default=0) or None


def _agreed(text: list[int], end: int) -> int:
    lengths = (n for n in range(min(end, MAX_MATCH_TOKENS), 0, -1) if text[end - n : end] == text[len(text) - n :])
    return next(lengths, 0)


def test_an_earlier_answer_is_drafted_again_up_to_its_end() -> None:
    answers = EarlierAnswers()
    answers.forget(request_of([1, 2, 3, 4], [50, 51, 52]))
    answers.forget(request_of([1, 2, 3, 5], [60, 61]))
    draft = answers.draft(request_of([1, 2, 3, 4], [50]), 8)
    assert draft is not None and list(draft.token_ids) == [51, 52]
    assert answers.draft(request_of([7, 7, 7, 7]), 8) is None


def test_the_latest_answer_wins() -> None:
    answers = EarlierAnswers()
    for token_id in (50, 60, 70):
        answers.forget(request_of([1, 2, 3], [token_id, 99, 98]))
    draft = answers.draft(request_of([1, 2, 3]), 2)
    assert draft is not None and list(draft.token_ids) == [70, 99]


def test_no_account_sees_what_another_was_answered() -> None:
    answers = EarlierAnswers()
    answers.forget(request_of([1, 2, 3], [50, 51, 52], ROOT))
    assert answers.draft(request_of([1, 2, 3], root=OTHER_ROOT), 4) is None
    assert answers.draft(request_of([1, 2, 3], root=None), 4) is None
    assert answers.draft(request_of([1, 2, 3], root=ROOT), 4) is not None


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
    assert answers.draft(reading, 4) is None


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
    assert answers.draft(request_of([1, 2, 3], root=ROOT), 1) is None
    draft = answers.draft(request_of([1, 2, 3], root=OTHER_ROOT), 1)
    assert draft is not None and list(draft.token_ids) == [70]


def test_texts_agree_by_whole_tokens_from_their_ends() -> None:
    rng, agreed = random.Random(3), set()
    for _ in range(300):
        text = [rng.choice((1, 257, 65793)) for _ in range(rng.randrange(2, 40))]  # alike in most bytes
        if match := match_in(text):
            end, num_matched = match
            before, most = text[:end], min(MAX_MATCH_TOKENS, end)
            assert num_matched == next((n for n in range(most) if before[-1 - n] != text[-1 - n]), most)
            agreed.add(num_matched)
    assert len(agreed) > 3
