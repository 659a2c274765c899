"""Embeddings, rankings and classes cost the model's price for input: in the header, in the ledger and in the window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.accounts.limits import Limits, Window
from control_plane.accounts.prices import PriceTable
from control_plane.accounts.service import Accounts
from control_plane.generation import EncodingRequest
from control_plane.storage.tables import ledger, windows
from tandem_runtime.errors import Unavailable
from tests.control_plane.api.test_encoders import EMBEDDING, RANKING, Encoders, pair_tokenizer, served

PRICES = PriceTable.parse(["*=11/5.5/22"])  # 1 neuron a token of input
RUN = "/client/v4/accounts/me/ai/run/@tandem/demo"


@asynccontextmanager
async def billed(
    accounts: Accounts, model: dict[str, Any], limits: Limits | None = None, **changes: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Encoders]]:
    accounts.metering._prices = PRICES
    await accounts.store.create("me", limits or Limits())
    _, secret = await accounts.store.create_token("me", "first", ["inference", "usage"])
    accounts.authenticator.forget()
    async with served(model, accounts=accounts, **changes) as (gateway, encoders):
        gateway.client.headers["authorization"] = f"Bearer {secret}"
        yield gateway.client, encoders


async def rows(accounts: Accounts) -> list[Any]:
    await accounts.metering.drain()
    async with accounts.database.each() as connection:
        return list(await connection.execute(sa.select(ledger).order_by(ledger.c.opened_ms, ledger.c.request_id)))


async def window(accounts: Accounts) -> Window:
    await accounts.metering.drain()
    async with accounts.database.each() as connection:
        return Window.decode(str(await connection.scalar(sa.select(windows.c.state))))


async def test_embeddings_have_one_row_and_cost_their_tokens(accounts: Accounts) -> None:
    async with billed(accounts, EMBEDDING) as (client, encoders):
        answer = await client.post("/v1/embeddings", json={"model": "demo", "input": ["Hello world", "how are you"]})
        native = await client.post(RUN, json={"text": "Hello"})
        first, second = await rows(accounts)
    num_tokens = sum(each.num_tokens for each in encoders.requests[0].inputs)
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens == first.num_prompt_tokens == first.num_computed_tokens
    assert float(answer.headers["cf-ai-neurons"]) == num_tokens and first.microneurons == num_tokens * 1e6
    assert (first.model, first.status, first.num_completion_tokens) == ("@tandem/demo", "finished", 0)
    assert (first.account, first.request_id) == ("me", answer.headers["cf-ai-req-id"])
    assert float(native.headers["cf-ai-neurons"]) * 1e6 == second.microneurons > 0


async def test_a_ranking_costs_each_pair(accounts: Accounts) -> None:
    async with billed(accounts, RANKING, tokenizer_json=pair_tokenizer()) as (client, encoders):
        body = {"model": "demo", "query": "which?", "documents": ["one", "two", "three"]}
        answer = await client.post("/v1/rerank", json=body)
        (row,) = await rows(accounts)
    num_tokens = sum(each.num_tokens for each in encoders.requests[0].inputs)
    assert answer.json()["usage"]["total_tokens"] == row.num_prompt_tokens == num_tokens


async def test_limits_count_texts(accounts: Accounts) -> None:
    async with billed(accounts, EMBEDDING, Limits(None, 30, 10)) as (client, encoders):
        body = {"model": "demo", "input": "Hello world, how are you, how are you"}
        answers = [await client.post("/v1/embeddings", json=body) for _ in range(4)]
    assert answers[0].status_code == 200 and answers[-1].status_code == 429
    assert "retry-after" in answers[-1].headers
    assert len(encoders.requests) == sum(answer.status_code == 200 for answer in answers)


async def test_a_refused_request_costs_nothing(accounts: Accounts) -> None:
    async with billed(accounts, EMBEDDING) as (client, encoders):
        encoders.refusal = Unavailable("no encode worker is ready")
        answer = await client.post("/v1/embeddings", json={"model": "demo", "input": "Hello"})
        wrong = await client.post("/v1/embeddings", json={"model": "demo", "input": [""]})
        (row,) = await rows(accounts)
    assert (answer.status_code, wrong.status_code) == (503, 400)
    assert (row.num_prompt_tokens or 0, row.microneurons or 0) == (0, 0) and row.status != "finished"


class HalfDone(Encoders):
    """Has encoded the first text when it waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.is_half_done = asyncio.Event()

    async def encode(self, request: EncodingRequest, computed: list[int]) -> bytes:
        computed.append(request.inputs[0].num_tokens)
        self.is_half_done.set()
        await asyncio.Future()
        raise AssertionError("it is cancelled")


async def test_who_leaves_pays_for_what_was_encoded(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    half_done = HalfDone()
    async with billed(accounts, EMBEDDING, Limits(None, 1_000, 10)) as (client, encoders):
        monkeypatch.setattr(encoders, "encode", half_done.encode)
        body = {"model": "demo", "input": ["Hello world", "how are you"]}
        leaving = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await asyncio.wait_for(half_done.is_half_done.wait(), 10)
        leaving.cancel()
        await asyncio.wait([leaving])
        async with asyncio.timeout(10):
            while not (found := [row for row in await rows(accounts) if row.status != "open"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        num_in_window = (await window(accounts)).num_tokens
    (row,) = found
    assert row.num_prompt_tokens == row.num_computed_tokens > 0 and row.microneurons == row.num_computed_tokens * 1e6
    assert (row.status, num_in_window) == ("cancelled", row.num_computed_tokens)
