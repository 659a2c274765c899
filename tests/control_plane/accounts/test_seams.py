"""The ledger counts the seams of each answer, and the migration that adds the column can be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from control_plane import storage
from control_plane.accounts.ledger import Closing, Ledger
from control_plane.accounts.service import Accounts
from control_plane.accounts.usage import Period, UsageReport, today
from control_plane.generation import Usage
from control_plane.storage.migrate import migrate
from control_plane.storage.tables import ledger
from tandem.v1 import types_pb2 as pb
from tests.control_plane.accounts.test_ledger import opening
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.test_class_seams import AT, CHAT, HELLO, ONE, OTHER, hello, model
from tests.control_plane.harness import harness
from tests.control_plane.scripted_worker import AttachStream, ScriptedWorker
from tests.tandem_worker.kv_harness import until


async def rows(accounts: Accounts) -> list[Any]:
    await accounts.metering.drain()
    async with accounts.database.each() as connection:
        return list(await connection.execute(sa.select(ledger).order_by(ledger.c.opened_ms, ledger.c.request_id)))


@pytest.mark.parametrize(("second", "num_seams"), [(OTHER, 1), (ONE, 0)])
async def test_a_row_and_the_report_have_the_number_of_seams(accounts: Accounts, second: str, num_seams: int) -> None:
    workers = [ScriptedWorker("a", behave=hello, numerics_class=ONE)]
    workers += [ScriptedWorker("b", behave=hello, numerics_class=second)]
    async with harness(*workers) as here, serve(here.dispatcher, accounts=accounts, **model()) as gateway:  # type: ignore[arg-type]
        for stream in (False, True):
            answer = await gateway.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert answer.status_code == 200
        assert [(row.num_completion_tokens, row.num_seams) for row in await rows(accounts)] == [
            (len(HELLO), num_seams)
        ] * 2
        report = UsageReport(accounts.database)
        ((day,), _) = await report.page(Period(today(), today()), None, None, 0, 10)
        assert (day["requests"], day["seams"]) == (2, 2 * num_seams)


async def test_a_client_that_leaves_after_a_seam_has_it_in_its_row(accounts: Accounts) -> None:
    async def hello_and_wait(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        place = len(submit.token_ids) - submit.num_prompt_tokens
        if place == 0:
            await hello(worker, attach, submit)
            return
        attach.accept(submit)
        attach.tokens(submit, len(submit.token_ids), HELLO[place : place + 2])

    workers = [ScriptedWorker(name, behave=hello_and_wait, numerics_class=name) for name in "ab"]
    async with harness(*workers) as here, serve(here.dispatcher, accounts=accounts, **model()) as gateway:  # type: ignore[arg-type]
        request = gateway.client.build_request("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        answer = await gateway.client.send(request, stream=True)
        num_texts = 0
        async for line in answer.aiter_lines():
            num_texts += '"content":"' in line and '"content":""' not in line
            if num_texts == AT + 2:
                break
        await answer.aclose()
        await until(lambda: here.dispatcher.num_requests == 0)
        (row,) = await rows(accounts)
        assert (row.status, row.num_completion_tokens, row.num_seams) == ("cancelled", AT + 2, 1)


async def test_the_column_can_be_taken_back_and_added_again(accounts: Accounts) -> None:
    book = Ledger(accounts.database, "g")
    await book.open(opening("r"))
    book.close(Closing("r", "finished", Usage(10, 10, 0, 5, num_seams=2)))
    await book.drain()
    assert [row.num_seams for row in await rows(accounts)] == [2]
    await to_revision(accounts, "0004")
    async with accounts.database.each() as connection:
        columns = await connection.run_sync(lambda sync: sa.inspect(sync).get_columns("ledger"))
        num_tokens = await connection.scalar(sa.text("SELECT num_completion_tokens FROM ledger"))
    assert "num_seams" not in [column["name"] for column in columns] and num_tokens == 5
    await migrate(accounts.database)
    assert [(row.num_completion_tokens, row.num_seams) for row in await rows(accounts)] == [(5, 0)]


async def to_revision(accounts: Accounts, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", f"{storage.__path__[0]}/migrations")

    def downgrade(connection: sa.Connection) -> None:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)

    async with accounts.database.begin() as connection:
        await connection.run_sync(downgrade)
