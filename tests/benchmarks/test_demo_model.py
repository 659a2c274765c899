"""Do the marks say what the answers deserve, and are the questions those that were held out?"""

from __future__ import annotations

from benchmarks.demo_model import markdown
from benchmarks.examination import Examined, Question, questions, readme_questions, story_requests
from benchmarks.marks import marks_of, missed_targets
from demo_model.corpus.held_out import GRADED_FAMILIES
from demo_model.corpus.sample import Message


def _question(family: str, expected: str | None, topic: tuple[str, ...] = ()) -> Question:
    return Question(family, (Message("user", "Well?"),), (), expected, topic)


def test_an_answer_is_right_only_word_for_word() -> None:
    question = _question("lists", "1, 2, 3")
    assert Examined(question, "1, 2, 3\n", "stop").is_right
    assert not Examined(question, "1, 2, 3, 4", "stop").is_right
    assert not Examined(_question("stories", None), "Once upon a time", "stop").is_right


def test_an_answer_is_on_topic_with_half_of_the_words_it_should_have() -> None:
    question = _question("questions", "A block is small.", ("a", "block", "is", "small"))
    assert Examined(question, "Is it a lease?", "stop").is_on_topic
    assert not Examined(question, "Hello there, block!", "stop").is_on_topic


def test_marks_are_shares_by_family_and_name_what_falls_short() -> None:
    right, wrong = _question("lists", "yes", ("yes",)), _question("json", "{}", ("never",))
    greedy = [Examined(right, "yes", "stop"), Examined(wrong, "no", "length")]
    sampled = [Examined(right, "yes", "stop"), Examined(_question("stories", None, ("owl",)), "An owl.", "stop")]
    marks = marks_of(greedy, sampled)
    assert marks.right == {"lists": 1.0, "json": 0.0}
    assert marks.sampled_right == {"lists": 1.0}
    assert marks.sampled_on_topic == {"lists": 1.0, "stories": 1.0}
    assert marks.all_stopped == 0.5
    assert marks.flat()["right.json"] == 0.0 and marks.flat()["num_questions"] == 2.0
    missed = missed_targets(marks)
    assert len(missed) == 2 and missed[0].startswith("json: 0.0% exactly right") and "50.0% of all" in missed[1]
    assert "| stories |  |  |  | 100.0% |" in markdown({"command": "x"}, marks, [])


def test_questions_cover_every_graded_family_and_end_before_the_answer() -> None:
    asked = questions(3)
    assert {question.family for question in asked} == set(GRADED_FAMILIES)
    assert len(asked) == 3 * len(GRADED_FAMILIES)
    assert all(question.messages[-1].role in ("user", "tool") and question.topic for question in asked)
    assert readme_questions()[0].asked == "What is a KV cache?"
    assert all(question.topic and question.expected is None for question in story_requests(20))
