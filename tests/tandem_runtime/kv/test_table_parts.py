"""A question for tables gets the answer of its own stream, in small parts, or a typed error in time."""

from __future__ import annotations

import asyncio

import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import RequestRow, TablesReply
from tandem_runtime.certificates.access import RULES
from tandem_runtime.errors import DeadlineExceeded, InternalError, TandemError, Unavailable, Unsupported
from tandem_runtime.kv import table_parts
from tandem_runtime.kv.table_parts import PART_BYTES, TableQuestions, answer_parts

SECONDS = 10.0


def tables(num_rows: int) -> TablesReply:
    rows = [RequestRow(request_id=f"request {number}", handle_id=bytes(16)) for number in range(num_rows)]
    return TablesReply(incarnation="life", requests=rows)


class Asking:
    """A stream that keeps the questions, and one caller who asks."""

    def __init__(self, answers: bool | None = True) -> None:
        self.sent: asyncio.Queue[pb.AskTables] = asyncio.Queue()
        self.questions = TableQuestions("worker w")
        if answers is not None:
            self.questions.opened(self.sent.put_nowait if answers else None)

    def ask(self, seconds: float = SECONDS) -> asyncio.Task[TablesReply]:
        return asyncio.create_task(self.questions.ask(100, seconds))

    def answer(self, parts: list[pb.TablesPart]) -> None:
        for part in parts:
            self.questions.received(part)


async def test_a_huge_table_comes_in_small_parts_and_is_whole_again() -> None:
    here = Asking()
    reply = here.ask()
    question = await here.sent.get()
    assert question.max_rows == 100
    parts = answer_parts(question, lambda max_rows: tables(5_000))
    assert len(parts) > 3
    assert max(len(part.data) for part in parts) == PART_BYTES
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    here.answer(parts)
    assert await reply == tables(5_000)


async def test_empty_tables_are_an_answer() -> None:
    here = Asking()
    reply = here.ask()
    here.answer(answer_parts(await here.sent.get(), lambda max_rows: TablesReply()))
    assert await reply == TablesReply()


async def test_a_stream_that_ends_in_the_middle_of_an_answer_ends_the_question_and_the_next_one_answers() -> None:
    here = Asking()
    reply = here.ask()
    here.answer(answer_parts(await here.sent.get(), lambda max_rows: tables(5_000))[:1])
    here.questions.closed()
    with pytest.raises(Unavailable, match="ended before"):
        await reply
    with pytest.raises(Unavailable, match="no stream to worker w"):
        await here.ask()
    here.questions.opened(here.sent.put_nowait)
    reply = here.ask()
    here.answer(answer_parts(await here.sent.get(), lambda max_rows: tables(1)))
    assert await reply == tables(1), "nothing of the first life is in it"


async def test_an_answer_that_never_comes_is_an_error_in_time_and_a_late_one_is_not_taken_for_the_next() -> None:
    here = Asking()
    with pytest.raises(DeadlineExceeded, match=r"worker w has not sent its tables within 0\.01 seconds"):
        await here.ask(0.01)
    late = answer_parts(await here.sent.get(), lambda max_rows: tables(1))
    here.answer(late)
    reply = here.ask()
    question = await here.sent.get()
    here.answer(late)
    assert not reply.done()
    here.answer(answer_parts(question, lambda max_rows: tables(2)))
    assert await reply == tables(2)


async def test_two_who_ask_at_once_are_answered_one_after_the_other() -> None:
    here = Asking()
    first, second = here.ask(), here.ask()
    here.answer(answer_parts(await here.sent.get(), lambda max_rows: tables(1)))
    assert await first == tables(1)
    here.answer(answer_parts(await here.sent.get(), lambda max_rows: tables(2)))
    assert await second == tables(2)


@pytest.mark.parametrize(
    ("answers", "error"), [(None, Unavailable), (False, Unsupported)], ids=["no stream", "an earlier release"]
)
async def test_a_service_that_does_not_answer_is_not_asked(answers: bool | None, error: type[TandemError]) -> None:
    here = Asking(answers)
    with pytest.raises(error):
        await here.ask()
    assert here.sent.empty()


async def test_a_table_that_cannot_be_made_is_an_error_of_the_question() -> None:
    def broken(max_rows: int) -> TablesReply:
        raise ZeroDivisionError

    here = Asking()
    reply = here.ask()
    here.answer(answer_parts(await here.sent.get(), broken))
    with pytest.raises(InternalError, match="could not be made"):
        await reply


async def test_more_bytes_than_a_message_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_parts, "MAX_BYTES", 2 * PART_BYTES)
    here = Asking()
    reply = here.ask()
    parts = answer_parts(await here.sent.get(), lambda max_rows: tables(5_000))
    here.answer(parts[:3])
    with pytest.raises(InternalError, match="more than"):
        await reply
    here.answer(parts[3:])  # nobody waits for them any more


async def test_bytes_that_are_no_tables_are_an_error_of_the_question() -> None:
    here = Asking()
    reply = here.ask()
    here.answer([pb.TablesPart(number=(await here.sent.get()).number, data=b"\xff", is_last=True)])
    with pytest.raises(InternalError, match="not readable"):
        await reply


def test_whoever_may_ask_on_a_stream_may_call_for_the_tables_and_nobody_else() -> None:
    for service, stream in (("WorkerService", "Attach"), ("KvTransferService", "BlockEvents")):
        on_stream, by_call = RULES[f"/tandem.v1.{service}/{stream}"], RULES[f"/tandem.v1.{service}/Tables"]
        assert on_stream.roles == by_call.roles == {"gateway"}
