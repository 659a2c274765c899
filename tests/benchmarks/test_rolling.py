"""What counts as a wrong stream during a rolling upgrade, and what a run of streams adds up to."""

from __future__ import annotations

import pytest

from benchmarks.lib.command import Outcome
from benchmarks.rolling.__main__ import enter
from benchmarks.rolling.streams import KINDS, Ask, Seen, asks

ASK = Ask("greedy", "one", 4, 7)


def _seen(*pieces: tuple[str, str], seams: tuple[str, ...] = (), num_tokens: int = 4, error: str = "") -> Seen:
    told = [{"choice": 0, "position": 2, "from": "a", "to": to} for to in seams]
    text = "".join(text for _, text in pieces)
    return Seen(text, list(pieces), told, num_tokens, 0.1, error)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (_seen(("a", "one "), ("a", "two")), ""),
        (_seen(("a", "one "), ("b", "two"), seams=("b",)), ""),
        (_seen(("a", "one "), ("b", "two")), "its events are of"),
        (_seen(("a", "one "), ("a", "two"), seams=("b",)), "its events are of"),
        (_seen(("a", "one one two")), "instead of"),
        (_seen(("a", "one two"), num_tokens=3), "3 tokens instead of 4"),
        (_seen(("a", "one "), error="broken"), "broken"),
    ],
)
def test_a_stream_is_right_if_its_text_is_the_undisturbed_one_and_its_seams_are_told(seen: Seen, problem: str) -> None:
    found = seen.problem(ASK, "one two")
    assert (problem in found) if problem else found == ""


def test_streams_are_of_every_kind_and_the_same_each_time() -> None:
    made = asks(30, 64, 256)
    assert made == asks(30, 64, 256) and {ask.kind for ask in made} == set(KINDS)
    assert all(64 <= ask.num_tokens <= 256 for ask in made)
    assert {"guided_regex" in ask.body("m") for ask in made if ask.kind == "constrained"} == {True}


def test_failed_wrong_and_seamed_streams_are_counted_apart() -> None:
    rolled = [
        _seen(("a", "one two")),
        _seen(("a", "one "), ("b", "two"), seams=("b",)),
        _seen(("a", "one")),
        _seen(error="gone"),
    ]
    outcome = Outcome()
    enter(outcome, {ASK: "one two"}, [(ASK, rolled[0])], [(ASK, seen) for seen in rolled])
    found = outcome.figures
    assert (found["streams"], found["failed"], found["wrong"]) == (4, 1, 1)
    assert (found["seamed_share"], found["classes"]) == (0.25, 2)
    assert found["ttft_p99_ratio"] == pytest.approx(1.0)
    assert [target.is_met for target in outcome.targets] == [False, False, False, False, True]
