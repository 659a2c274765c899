"""All sums of the ledger hold after a mixed load with cancellations and a killed worker, on both databases.

`make ledger` runs it with 2,000 requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import sqlalchemy as sa
from tokenizers import Tokenizer

from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import ledger
from tests.control_plane.postgres import Postgres, running_postgres
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL, client

NUM_REQUESTS = int(os.environ.get("TANDEM_LEDGER_REQUESTS", "100"))
SECONDS = 100 + NUM_REQUESTS
"""Enough on a small machine that others use too."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(SECONDS + 20)]

AT_ONCE = 12
WORDS = ("the", "a", "model", "cache", "block", "token", "worker", "prompt", "answer", "reads", "finds", "slowly")
BEGINNING = "You are a helpful assistant who knows everything about caches and answers in few words. " * 6


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('ledger')}/tandem.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("ledger-fleet"), database_url=url, local_prefill="auto") as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        for index in range(2):
            fleet.start("decode", f"decode-{index}", *SMALL)
        await fleet.ready()
        yield fleet


@dataclass
class Seen:
    """What clients saw, by request id."""

    usages: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    prompts: dict[str, list[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


async def test_the_ledgers_sums_hold_and_are_what_clients_were_told(fleet: Fleet, url: str) -> None:
    chance, seen, turn = random.Random(7), Seen(), asyncio.Semaphore(AT_ONCE)
    plans = [(chance.choice(("whole", "stream", "prompts", "leave")), chance.random()) for _ in range(NUM_REQUESTS)]
    num_done = 0
    async with client(fleet.base_url) as http:

        async def one(kind: str, luck: float) -> None:
            nonlocal num_done
            async with turn:
                await ask(http, seen, kind, random.Random(luck))
                num_done += 1

        load = asyncio.gather(*(one(*plan) for plan in plans))
        await until(lambda: num_done >= NUM_REQUESTS // 3, SECONDS)
        fleet.services["decode-0"].kill(signal.SIGKILL)
        await fleet.ended(fleet.services.pop("decode-0"))
        await load
    await fleet.pools_are_full()
    rows = await closed_rows(url)

    assert not seen.failed, seen.failed
    statuses = Counter(row.status for row in rows.values())
    num_prompts = sum(len(prompts) for prompts in seen.prompts.values())
    assert statuses["finished"] + statuses["cancelled"] == len(rows) == num_prompts, statuses
    for row in rows.values():
        assert row.num_prompt_tokens == row.num_computed_tokens + row.num_cached_tokens
        assert row.num_cached_tokens == row.num_pool_tokens + row.num_store_tokens + row.num_remote_tokens
        if row.num_completion_tokens:
            assert row.num_prompt_tokens == row.num_asked_tokens
        else:  # the client left before its first token: it pays for what was computed
            assert (
                row.status == "cancelled" and row.num_prompt_tokens == row.num_computed_tokens <= row.num_asked_tokens
            )
        assert row.opened_ms <= row.closed_ms and row.account == "default" and row.model == MODEL
        if row.status == "finished":
            assert row.num_prompt_tokens and row.num_completion_tokens and row.microneurons > 0
            assert row.prefill_us + row.decode_us > 0 and row.finish_reasons
    assert sum(row.num_cached_tokens for row in rows.values()) > 0, "prompts that begin alike share their cache"
    assert sum(row.num_bytes_moved for row in rows.values()) > 0, "some prompts were handed over"
    await compare_with_clients(fleet, rows, seen)
    await compare_with_report(fleet, rows)


async def ask(http: httpx.AsyncClient, seen: Seen, kind: str, chance: random.Random) -> None:
    prompts = [prompt(chance) for _ in range(3 if kind == "prompts" else 1)]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompts if kind == "prompts" else prompts[0],
        "max_tokens": 60 if kind == "leave" else chance.randint(1, 12),
        "temperature": 1.0,
        "seed": chance.getrandbits(32),
        "n": 1,
    }
    if kind in ("whole", "prompts"):
        answer = await http.post("/v1/completions", json=body)
        request_id = answer.headers["cf-ai-req-id"]
        if answer.status_code != 200:
            seen.failed[request_id] = answer.text
            return
        seen.prompts[request_id], seen.usages[request_id] = prompts, [answer.json()["usage"]]
        assert float(answer.headers["cf-ai-neurons"]) == pytest.approx(answer.json()["usage"]["neurons"])
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": kind == "leave"}
    num_to_read = chance.randint(0, 8)
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        request_id = answer.headers["cf-ai-req-id"]
        seen.prompts[request_id] = prompts
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                seen.failed[request_id] = line
            elif not event["choices"]:
                seen.usages[request_id] = [event["usage"]]
            elif kind == "leave" and (num_to_read := num_to_read - 1) < 0:
                seen.left.add(request_id)
                return


def prompt(chance: random.Random) -> str:
    beginning = BEGINNING if chance.random() < 0.6 else ""
    return beginning + " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 80)))


async def closed_rows(url: str) -> dict[str, Any]:
    """Wait until every row is closed; returns them by request id."""
    database = Database(database_url(url, Path()))
    found: dict[str, Any] = {}

    async def all_closed() -> bool:
        async with database.each() as connection:
            found.update({row.request_id: row for row in await connection.execute(sa.select(ledger))})
        return all(row.status != "open" for row in found.values())

    try:
        await until(all_closed, 30)
    finally:
        await database.close()
    return found


async def compare_with_clients(fleet: Fleet, rows: dict[str, Any], seen: Seen) -> None:
    """A usage is what the rows of its request say, and what the tokenizer counts."""
    description = await fleet.gateway.catalog.get(MODEL)
    tokenizer = Tokenizer.from_str(bytes(description.tokenizer_json).decode())
    for request_id, (usage,) in seen.usages.items():
        prompts = seen.prompts[request_id]
        mine = [rows[request_id], *(rows[f"{request_id}-{index}"] for index in range(1, len(prompts)))]
        assert usage["prompt_tokens"] == sum(row.num_prompt_tokens for row in mine)
        assert usage["prompt_tokens"] == sum(len(tokenizer.encode(prompt).ids) for prompt in prompts)
        assert usage["completion_tokens"] == sum(row.num_completion_tokens for row in mine)
        assert usage["prompt_tokens_details"]["cached_tokens"] == sum(row.num_cached_tokens for row in mine)
        assert usage["neurons"] == pytest.approx(sum(row.microneurons for row in mine) / 1e6, abs=1e-9)
        assert {row.status for row in mine} == {"finished"}
    assert {rows[request_id].status for request_id in seen.left} <= {"cancelled", "finished"}
    assert len(seen.usages) + len(seen.left) == NUM_REQUESTS


async def compare_with_report(fleet: Fleet, rows: dict[str, Any]) -> None:
    async with client(fleet.base_url) as http:
        report = (await http.get("/client/v4/accounts/default/ai/usage")).json()["result"]
    assert sum(day["requests"] for day in report) == len(rows)
    for name in ("prompt", "computed", "cached", "completion"):
        total = sum(getattr(row, f"num_{name}_tokens") for row in rows.values())
        assert sum(day[f"{name}_tokens"] for day in report) == total
    assert sum(day["neurons"] for day in report) == pytest.approx(sum(row.microneurons for row in rows.values()) / 1e6)
