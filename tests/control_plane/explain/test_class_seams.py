"""A seam is where the tokens of another numerics class begin, among the tokens that the client has."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.explain.class_seams import ClassRuns
from tandem.v1 import types_pb2 as pb

ONE, OTHER = (pb.Fingerprint(digest=b"f", numerics_class=name) for name in ("one", "other"))


@dataclass
class Choice:
    num_delivered: int


def test_runs_of_one_class_have_no_seam() -> None:
    runs = ClassRuns()
    assert runs.begin(0, 0, "p", ONE) is None and runs.begin(0, 1, "a", ONE) is None
    assert runs.begin(0, 7, "b", ONE) is None
    assert runs.seams([Choice(9)]) == [] and not runs.has_changed


def test_a_seam_has_its_choice_its_position_and_both_runs() -> None:
    runs = ClassRuns()
    runs.begin(0, 0, "a", ONE)
    runs.begin(1, 0, "a", ONE)
    seam = runs.begin(1, 3, "b", OTHER)
    assert seam is not None and (seam.choice, seam.position) == (1, 3)
    assert (seam.before.worker_id, seam.after.worker_id) == ("a", "b")
    assert (seam.before.numerics_class, seam.after.numerics_class) == ("one", "other")
    assert runs.seams([Choice(9), Choice(9)]) == [seam]


def test_a_seam_counts_once_a_token_after_it_was_delivered() -> None:
    runs = ClassRuns()
    runs.begin(0, 0, "a", ONE)
    runs.begin(0, 3, "b", OTHER)
    assert [len(runs.seams([Choice(num)])) for num in (0, 3, 4)] == [0, 0, 1]


def test_a_worker_that_produced_nothing_new_makes_no_seam() -> None:
    """It repeated prefill's token, or was lost before a token: the next worker begins at the same position."""
    runs = ClassRuns()
    runs.begin(0, 0, "p", ONE)
    runs.begin(0, 1, "a", OTHER)
    runs.begin(0, 1, "b", ONE)
    assert runs.seams([Choice(5)]) == []


def test_there_and_back_are_two_seams() -> None:
    runs = ClassRuns()
    for position, fingerprint in ((0, ONE), (2, OTHER), (5, ONE)):
        runs.begin(0, position, "w", fingerprint)
    assert [seam.position for seam in runs.seams([Choice(9)])] == [2, 5]


def test_each_token_belongs_to_the_run_that_began_before_it() -> None:
    runs = ClassRuns()
    assert runs.at(0, 0) is None
    runs.begin(0, 0, "a", ONE)
    runs.begin(0, 2, "b", OTHER)
    found = [runs.at(0, num_delivered) for num_delivered in range(5)]
    assert [run.worker_id if run else "" for run in found] == ["a", "a", "a", "b", "b"]


def test_who_watches_learns_of_another_class_whether_it_began_before_or_after() -> None:
    told: list[str] = []
    early, late = ClassRuns(), ClassRuns()
    early.begin(0, 0, "a", OTHER)
    for runs, name in ((early, "early"), (late, "late")):
        runs.watch("one", lambda name=name: told.append(name))  # type: ignore[misc]
    assert told == ["early"]
    late.begin(0, 0, "a", ONE)
    assert told == ["early"]
    late.begin(0, 2, "b", OTHER)
    assert told == ["early", "late"]
