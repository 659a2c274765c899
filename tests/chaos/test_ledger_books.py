"""Tests of the comparison of ledger and answers: what nobody has is found, what a killed gateway explains is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from tests.chaos.http_client import HttpQuestion, HttpStreamRecord
from tests.chaos.ledger_books import LedgerBooks
from tests.system.fleet import Fleet

QUESTION = HttpQuestion({}, ("abcd",), ("length",), 4, 7)
VECTORS = HttpQuestion({}, (), (), 0, 7)
LIVING = {"alive"}


@dataclass
class Row:
    num_completion_tokens: int = 4
    status: str = "finished"
    gateway: str = "alive"
    error: str = ""
    closed_ms: int | None = 1


def mistakes(books: LedgerBooks, rows: dict[str, Row], *records: HttpStreamRecord, num_cut_off: int = 0) -> list[str]:
    return list(books._mistakes(dict(rows), LIVING, records, num_cut_off))


@pytest.fixture
def books() -> LedgerBooks:
    return LedgerBooks(cast(Fleet, None))


def test_each_answer_has_its_row_and_each_row_its_answer(books: LedgerBooks) -> None:
    answered = HttpStreamRecord(QUESTION, request_id="1")
    assert mistakes(books, {"1": Row()}, answered) == []
    assert "no row" in mistakes(books, {}, answered)[0]
    assert "not the whole answer" in mistakes(books, {"1": Row(3)}, answered)[0]
    assert "nobody has this answer" in mistakes(books, {"1": Row(), "2": Row()}, answered)[0]
    assert mistakes(books, {"1": Row(), "2": Row()}, answered, num_cut_off=1) == []


def test_what_a_killed_gateway_had_written_and_not_sent_is_lost_if_so_many_connections_broke(
    books: LedgerBooks,
) -> None:
    lost = {"1": Row(), "2": Row(gateway="killed")}
    cut_off = HttpStreamRecord(QUESTION, request_id="1", num_unreached=1)
    assert "nobody has this answer" in mistakes(books, lost, HttpStreamRecord(QUESTION, request_id="1"))[0]
    assert (mistakes(books, lost, cut_off), books.num_lost) == ([], 1)
    assert len(mistakes(books, {**lost, "3": Row(gateway="killed")}, cut_off)) == 2
    assert mistakes(books, {**lost, "2": Row(gateway="killed", status="aborted")}, cut_off)


def test_an_answer_of_a_killed_gateway_is_free_if_its_row_was_open_and_vectors_have_no_tokens(
    books: LedgerBooks,
) -> None:
    answered = HttpStreamRecord(QUESTION, request_id="1")
    open_row = Row(0, "aborted", "killed", "GatewayLost")
    assert (mistakes(books, {"1": open_row}, answered), books.num_free) == ([], 1)
    vectors = HttpStreamRecord(VECTORS, is_streamed=False, request_id="1")
    assert (mistakes(books, {"1": Row(0, gateway="killed")}, vectors), books.num_free) == ([], 1)
    assert (mistakes(books, {"1": open_row}, vectors), books.num_free) == ([], 2)
    assert "not the whole answer" in mistakes(books, {"1": Row(0, "aborted")}, vectors)[0]
