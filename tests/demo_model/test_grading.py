"""Grading counts only the expected words, and a packaged model answers."""

from demo_model.corpus import GradedItem, Message
from demo_model.grade import Answerer, Graded, grade, shares
from tandem_engine.demo import checkpoint_path


def item(family: str, question: str, expected: str) -> GradedItem:
    return GradedItem(family, "a template", "values", (Message("user", question),), (), expected)


def test_only_a_word_for_word_answer_is_right() -> None:
    hello = item("small_talk", "Hi", "Hello!")
    marks = [Graded(hello, "Hello!"), Graded(hello, " Hello!\n"), Graded(hello, "hello!"), Graded(hello, "Hello! Bye.")]
    assert [mark.is_right for mark in marks] == [True, True, False, False]
    assert shares(marks) == {"small_talk": 0.5}


def test_every_question_is_answered_once_whatever_its_length() -> None:
    items = [item("copying", "Repeat: " + "word " * length, "x") for length in (9, 1, 5)]
    graded = grade(Answerer(checkpoint_path()), items, batch_size=2, max_new_tokens=4)
    assert sorted(one.item.question for one in graded) == sorted(one.question for one in items)


def test_greedy_answers_do_not_depend_on_the_batch() -> None:
    answerer = Answerer(checkpoint_path())
    prompts = [
        answerer.prompt([{"role": "user", "content": text}]) for text in ("Hi", "What is a KV cache? Thank you.")
    ]
    assert answerer.complete(prompts, 8) == [answerer.complete([prompt], 8)[0] for prompt in prompts]
