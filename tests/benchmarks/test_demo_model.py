"""The scores follow the answers, and the questions are the held-out ones."""

from __future__ import annotations

from benchmarks.demo_model.__main__ import markdown
from benchmarks.demo_model.eval import Evaluated, Question, questions, readme_questions, story_requests
from benchmarks.demo_model.scores import missed_targets, scores_of
from demo_model.corpus.held_out import GRADED_FAMILIES
from demo_model.corpus.sample import Message


def _question(family: str, expected: str | None, topic: tuple[str, ...] = ()) -> Question:
    return Question(family, (Message("user", "Well?"),), (), expected, topic)


def test_an_answer_is_right_only_word_for_word() -> None:
    question = _question("lists", "1, 2, 3")
    assert Evaluated(question, "1, 2, 3\n", "stop").is_right
    assert not Evaluated(question, "1, 2, 3, 4", "stop").is_right
    assert not Evaluated(_question("stories", None), "Once upon a time", "stop").is_right


def test_an_answer_is_on_topic_with_half_of_the_words_it_should_have() -> None:
    question = _question("questions", "A block is small.", ("a", "block", "is", "small"))
    assert Evaluated(question, "Is it a lease?", "stop").is_on_topic
    assert not Evaluated(question, "Hello there, block!", "stop").is_on_topic


def test_marks_are_shares_by_family_and_name_what_falls_short() -> None:
    right, wrong = _question("lists", "yes", ("yes",)), _question("json", "{}", ("never",))
    greedy = [Evaluated(right, "yes", "stop"), Evaluated(wrong, "no", "length")]
    sampled = [Evaluated(right, "yes", "stop"), Evaluated(_question("stories", None, ("owl",)), "An owl.", "stop")]
    scores = scores_of(greedy, sampled)
    assert scores.right == {"lists": 1.0, "json": 0.0}
    assert scores.sampled_right == {"lists": 1.0}
    assert scores.sampled_on_topic == {"lists": 1.0, "stories": 1.0}
    assert scores.all_stopped == 0.5
    assert scores.flat()["right.json"] == 0.0 and scores.flat()["num_questions"] == 2.0
    missed = missed_targets(scores)
    assert len(missed) == 2 and missed[0].startswith("json: 0.0% exactly right") and "50.0% of all" in missed[1]
    assert "| stories |  |  |  | 100.0% |" in markdown({"command": "x"}, scores, [])


def test_questions_cover_every_graded_family_and_end_before_the_answer() -> None:
    asked = questions(3)
    assert {question.family for question in asked} == set(GRADED_FAMILIES)
    assert len(asked) == 3 * len(GRADED_FAMILIES)
    assert all(question.messages[-1].role in ("user", "tool") and question.topic for question in asked)
    assert readme_questions()[0].asked == "What is a KV cache?"
    assert all(question.topic and question.expected is None for question in story_requests(20))
