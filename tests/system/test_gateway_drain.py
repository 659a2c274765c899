"""A gateway that drains: answers end by themselves, or with an error that says why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import ledger
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet
from tests.system.streams import MODEL, client

NUM_STREAMS = 16


class Reader:
    """Reads a stream of text to its end, whatever the end is."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._body = {
            "model": MODEL,
            "prompt": "Once upon a time",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": seed,
            "temperature": 1.0,
            "logprobs": 0,
        }
        self.request_id = ""
        self.num_tokens = 0
        self.has_begun = asyncio.Event()
        self.events: list[dict[str, Any]] = []
        self.is_done = False

    async def read(self, http: httpx.AsyncClient) -> None:
        try:
            await self._read(http)
        except httpx.RemoteProtocolError:  # behind an error the connection is closed
            assert "error" in self.events[-1], self.events[-1]

    async def _read(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            self.request_id = response.headers["x-request-id"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    choices = self.events[-1].get("choices", ())
                    self.num_tokens += sum(len(choice["logprobs"]["tokens"]) for choice in choices)
                    self.has_begun.set()


async def _drained(folder: Path, num_tokens: int, **settings: Any) -> tuple[int, list[Reader]]:
    """Begin streams, drain the gateway in their middle, and return its exit code and what the streams got."""
    readers = [Reader(num_tokens, seed) for seed in range(NUM_STREAMS)]
    async with Fleet(folder, **settings) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", "--num-threads", "1", "--num-kv-blocks", "2048", "--dtype", "float32")
        await fleet.ready()
        async with client(fleet.base_url) as http, asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.read(http))
            async with asyncio.timeout(60):
                await asyncio.gather(*(reader.has_begun.wait() for reader in readers))
            code = await fleet.drain_gateway()
    return code, readers


@pytest.mark.slow
async def test_no_stream_is_lost_while_a_gateway_drains(tmp_path: Path) -> None:
    code, readers = await _drained(tmp_path, 300, drain_seconds=100.0)
    assert code == 0
    assert [reader.is_done for reader in readers] == [True] * NUM_STREAMS
    assert not [event for reader in readers for event in reader.events if "error" in event]


@pytest.mark.slow
async def test_what_does_not_end_in_time_ends_with_an_error(tmp_path: Path) -> None:
    code, readers = await _drained(tmp_path, 1_900, drain_seconds=0.1)
    assert code == 0
    cut = [reader for reader in readers if not reader.is_done]
    assert cut, "all 16 answers of 1,900 tokens ended within 0.1 s"
    for reader in cut:
        *_, last = reader.events
        assert last["error"]["code"] == "draining" and "--drain-seconds" in last["error"]["message"], last
        assert "send the request again" in last["error"]["message"]
    rows = await _rows(tmp_path / "state")
    assert set(rows) == {reader.request_id for reader in readers}
    for reader in readers:
        row = rows[reader.request_id]
        outcome = ("finished", "") if reader.is_done else ("aborted", "GatewayDraining")
        assert (row.status, row.error, row.num_completion_tokens) == (*outcome, reader.num_tokens)


async def _rows(state_dir: Path) -> dict[str, Any]:
    database = Database(database_url("", state_dir))
    try:
        async with database.each() as connection:
            return {row.request_id: row for row in await connection.execute(sa.select(ledger))}
    finally:
        await database.close()
