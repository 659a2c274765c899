"""The corpus is reproducible, and graded questions are never trained."""

import re
from itertools import islice

from demo_model.corpus import Document, GradedItem, document, documents, held_out
from demo_model.corpus.arithmetic import Operands, difference_in_steps, sum_in_steps
from demo_model.corpus.facts import FACTS
from demo_model.corpus.held_out import GRADED_FAMILIES
from demo_model.corpus.split import values_are_held_out

NUM_DOCUMENTS = 6000


def training_documents() -> list[Document]:
    short = list(islice(documents(1), NUM_DOCUMENTS))
    return short + list(islice(documents(1, long=True), NUM_DOCUMENTS // 20))


def words_said(document_: Document, role: str) -> list[str]:
    return [message.content for message in document_.messages if message.role == role] if not document_.text else []


def test_a_document_is_the_same_whoever_asks_for_it() -> None:
    assert [document(3, index) for index in range(40)] == list(islice(documents(3), 40))
    assert document(3, 17) == next(documents(3, first=17))
    assert document(3, 17) != document(4, 17)


def test_held_out_questions_are_the_same_every_time() -> None:
    assert held_out(20) == held_out(20)


def test_every_graded_family_has_at_least_300_different_questions() -> None:
    items = held_out()
    for family in GRADED_FAMILIES:
        chats = [(item.messages, str(item.tools)) for item in items if item.family == family]
        assert len(chats) >= 300 and len(set(chats)) == len(chats)


def test_no_held_out_template_is_in_the_training_stream() -> None:
    trained = {sample.template for document_ in training_documents() for sample in document_.samples}
    assert not trained & {item.template for item in held_out()}


def test_no_held_out_question_is_in_the_training_stream() -> None:
    asked = {text for document_ in training_documents() for text in words_said(document_, "user")}
    assert not asked & {item.question for item in held_out()}


def test_every_phrasing_left_to_training_is_used() -> None:
    trained = {sample.template for document_ in training_documents() for sample in document_.samples}
    for prefix in ("arithmetic/sum", "arithmetic/difference", "questions/concept", "copying/repeat"):
        assert len([template for template in trained if template.startswith(prefix)]) >= 12


def test_no_held_out_operand_pair_is_worked_out_anywhere_in_training() -> None:
    pattern = re.compile(r"\b(\d{1,2}) ?[+-] ?(\d{1,2})\b(?! [+-])")
    seen = 0
    for document_ in training_documents():
        for text in words_said(document_, "user") + words_said(document_, "assistant"):
            for a, b in pattern.findall(re.sub(r"(Tens|Ones): [^.]*\.", "", text)):
                seen += 1
                assert not Operands(int(a), int(b)).held_out, text
    assert seen > 500


def test_about_a_tenth_of_all_operand_pairs_is_held_out_in_both_orders() -> None:
    pairs = [Operands(a, b) for a in range(100) for b in range(100)]
    share = sum(pair.held_out for pair in pairs) / len(pairs)
    assert 0.07 < share < 0.13
    assert all(pair.held_out == Operands(pair.b, pair.a).held_out for pair in pairs)
    assert not any(pair.held_out for pair in pairs if max(pair.a, pair.b) < 20)


def test_the_values_of_graded_items_are_held_out() -> None:
    copied: list[GradedItem] = [item for item in held_out(50) if item.family == "copying"]
    assert all(values_are_held_out(item.values) for item in copied)


def test_sums_and_differences_end_with_the_right_number() -> None:
    for a in range(100):
        for b in range(100):
            assert sum_in_steps(a, b).endswith(f"{a} + {b} = {a + b}.")
            assert difference_in_steps(a, b).endswith(f"{a} - {b} = {a - b}.")


def test_a_sum_is_worked_out_from_the_ones_to_the_tens() -> None:
    assert sum_in_steps(17, 25) == "Ones: 7 + 5 = 12, carry 1. Tens: 1 + 2 + 1 = 4. So 17 + 25 = 42."
    assert sum_in_steps(3, 4) == "3 + 4 = 7."
    assert difference_in_steps(42, 17) == "Ones: 12 - 7 = 5, borrow 1. Tens: 4 - 1 - 1 = 2. So 42 - 17 = 25."
    assert difference_in_steps(3, 4) == "3 is less than 4, so turn it around. 4 - 3 = 1. So 3 - 4 = -1."


def test_every_fact_is_asked_in_training_and_subjects_are_not_shared() -> None:
    subjects = [(fact.kind, subject) for fact in FACTS for subject in fact.subjects]
    assert len(set(subjects)) == len(subjects)
    answered = {text for document_ in training_documents() for text in words_said(document_, "assistant")}
    assert {fact.answer for fact in FACTS} <= answered


def test_chats_never_begin_or_end_a_message_with_white_space() -> None:
    for document_ in training_documents():
        for message in () if document_.text else document_.messages:
            assert message.content == message.content.strip(), message
