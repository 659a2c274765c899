"""No part of a stop string, and nothing after it, is ever released."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.text import stop_strings
from control_plane.text.stop_strings import StopStrings


def run(strings: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stop = StopStrings(strings)
    text = "".join(stop.push(piece) for piece in pieces) + stop.flush()
    return text, stop.matched


def test_text_without_a_stop_string_passes_whole() -> None:
    assert run([], ["a", "b"]) == ("ab", None)
    assert run(["xyz"], ["ax", "y", "b"]) == ("axyb", None)


def test_a_stop_string_over_several_pieces_is_cut_with_all_that_follows() -> None:
    assert run(["STOP"], ["tell S", "TO", "P and more", "!"]) == ("tell ", "STOP")


def test_what_may_become_a_stop_string_is_held_back_until_it_is_sure() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert [stop.push(piece) for piece in ["Hi", "\n", "\n", "Use", "d"]] == ["Hi", "", "", "", "\n\nUsed"]


def test_what_is_held_back_leaves_at_the_end() -> None:
    assert run(["END"], ["the EN"]) == ("the EN", None)


def test_the_first_match_to_be_complete_wins() -> None:
    assert run(["abc", "b"], ["abc"]) == ("a", "b")
    assert run(["abc", "b"], ["a", "b", "c"]) == ("a", "b")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


@pytest.mark.parametrize("strings", [["aa"], ["aba", "b"], ["abab", "bb"], ["ab", "ba", "aaa"]])
@given(pieces=st.lists(st.text(alphabet="abc", max_size=3), max_size=8))
def test_the_result_does_not_depend_on_how_the_text_was_cut(strings: list[str], pieces: list[str]) -> None:
    text, matched = run(strings, pieces)
    assert (text, matched) == run(strings, ["".join(pieces)]) == run(strings, list("".join(pieces)))
    assert not any(string in text for string in strings)
    assert "".join(pieces).startswith(text)


def num_lines_run(strings: list[str], text: str) -> int:
    """Return how many lines of the module run while a text arrives character by character."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != stop_strings.__file__:
            return None
        count += event == "line"
        return trace

    stop = StopStrings(strings)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for character in text:
            stop.push(character)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("unit", ["a", "ab"])
def test_a_match_that_breaks_at_its_end_again_and_again_costs_no_more_than_the_text_is_long(unit: str) -> None:
    short, long = (num_lines_run([unit * 200 + "!", unit * 100 + "?"], unit * 500 * times) for times in (1, 4))
    assert long < 4.5 * short
