"""The events of a fleet: joins, a drain and its end, a killed worker, a move, a refusal; kept over a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.events import request_watch
from tandem_runtime import log
from tests.system import fleet as fleets
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet
from tests.system.streams import MODEL

LONG = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SHORT = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
ROOM = (*SMALL, "--num-kv-blocks", "512")


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    await fleets.until(condition, 30.0)


async def _events(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await http.get("/v1/events", params={"limit": 1000, **query})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


async def _until_kind(http: httpx.AsyncClient, kind: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    async def is_there() -> bool:
        found[:] = await _events(http, kind=kind)
        return bool(found)

    await _until(is_there)
    return found[-1]


async def _state_of(http: httpx.AsyncClient, worker: str) -> str:
    rows = (await http.get("/v1/workers")).json()["data"]
    return next(str(row["state"]) for row in rows if row["name"] == worker)


async def test_a_fleets_life_is_told_in_events_and_outlives_its_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_watch, "_WINDOW_SECONDS", 2.0)  # its own tests have the ten seconds of a gateway
    log.configure("tandem-control", json=True)
    async with Fleet(tmp_path, suspect_seconds=2.0, gone_seconds=3.0) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        for number in range(2):
            fleet.start("decode", f"decode-{number}", *ROOM)
        await fleet.ready("kv-0", "prefill-0", "decode-0", "decode-1")
        async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as http:
            await _until_kind(http, "model_ready")
            for _ in range(3):
                assert (await http.post("/v1/completions", json={**SHORT, "model": "nobody"})).status_code == 404

            # 1. A drained worker finishes its answer, takes nothing new, and is resumed.
            answers = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(4)]
            busy = await _busy_worker(http)
            other = {"decode-0": "decode-1", "decode-1": "decode-0"}[busy]
            drained = await http.post(f"/v1/workers/{busy}/drain")
            assert drained.json()["state"] == "draining"
            assert "warning" not in drained.json(), "the other decode worker takes requests"
            await _until(lambda: _is(http, busy, "draining"))
            assert [(await answer).json()["usage"]["completion_tokens"] for answer in answers] == [200] * 4
            generated = await _generated(fleet, busy)
            for _ in range(4):
                assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
            assert await _generated(fleet, busy) == generated, "nothing new went there"
            assert "warning" in (await http.post(f"/v1/workers/{other}/drain")).json(), "it was the last one"
            for number in range(2):
                assert (await http.post(f"/v1/workers/decode-{number}/resume")).json()["state"] == "ready"
                await _until(partial(_is, http, f"decode-{number}", "ready"))
            assert (await http.post("/v1/workers/nobody/drain")).status_code == 404
            no_requests = await http.post("/v1/workers/kv-0/drain")
            assert (no_requests.status_code, "KV service" in no_requests.text) == (400, True)
            other_site = {"sec-fetch-site": "cross-site", "origin": "http://elsewhere.example"}
            assert (await http.post("/v1/workers/decode-0/drain", headers=other_site)).status_code == 403

            # 2. A killed worker's answer goes on elsewhere.
            answer = asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 400}))
            name = await _busy_worker(http)
            fleet.services[name].kill()
            assert (await answer).json()["usage"]["completion_tokens"] == 400
            moved = await _until_kind(http, "request_migrated")
            assert moved["cause"] == "Unavailable"
            assert moved["request_id"] == (await answer).headers["x-request-id"]
            lost = await _until_kind(http, "worker_lost")
            assert lost["role"] == "decode"

            # 3. Refusals are summed by cause, once their window has ended.
            refused = await _until_kind(http, "requests_refused")
            assert (refused["cause"], refused["fields"]["count"], refused["model"]) == ("ModelNotFound", 3, "")
            kinds = [event["kind"] for event in await _events(http)]
            for kind in ("listening", "worker_joined", "worker_ready", "drain_requested", "worker_draining"):
                assert kind in kinds, kind
            ids = [event["id"] for event in await _events(http)]
            assert ids == list(range(1, len(ids) + 1))
            paged: list[int] = []
            while page := await _events(http, after=paged[-1] if paged else 0, limit=5):
                paged += [event["id"] for event in page]
            assert paged[: len(ids)] == ids
            of_one = await _events(http, worker="decode-0")
            assert of_one == await _events(http, worker=of_one[0]["worker"]), "by name as by id"

        # 4. Another gateway on the same database has the same events.
        await fleet.restart_gateway()
        async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as http:
            again = await _events(http)
            assert [event["id"] for event in again[: len(ids)]] == ids
            assert len({event["gateway"] for event in again}) == 2
            assert [event["kind"] for event in again[len(ids) :]][:3] == ["draining", "gateway_stopped", "listening"]
            assert (await http.get("/v1/events", params={"kind": "nonsense"})).status_code == 400
            assert (await http.get("/v1/events", params={"after": "-1"})).status_code == 400


async def _is(http: httpx.AsyncClient, worker: str, state: str) -> bool:
    return await _state_of(http, worker) == state


async def _busy_worker(http: httpx.AsyncClient) -> str:
    """Return the decode worker of a request that runs."""
    busy: list[str] = []

    async def is_busy() -> bool:
        rows = (await http.get("/v1/requests")).json()["data"]
        busy[:] = [row["decode"] for row in rows if row["state"] == "running" and row["completion_tokens"]]
        return bool(busy)

    await _until(is_busy)
    return busy[0]


async def _generated(fleet: Fleet, worker: str) -> float:
    return (await fleet.stats(worker)).counters["tokens_generated"]
