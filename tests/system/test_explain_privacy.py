"""A marked prompt is nowhere but in its own account's explanation, and there only with --explain-texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.accounts.store import AccountStore
from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import metadata
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL
from tests.telemetry import Telemetry, collected

MARK = "zqsecretqz"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": f"My secret is {MARK}."}], "max_tokens": 12}
OPERATOR = "an-operators-token"


async def test_a_marked_prompt_is_in_its_own_explanation_only_and_only_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collected(monkeypatch, as_json=True) as telemetry:
        async with Fleet(tmp_path, operator_token=OPERATOR) as fleet:
            fleet.start("decode", "decode-0", *SMALL)
            await fleet.ready()
            database = Database(database_url("", tmp_path / "state"))
            try:
                secrets = await _accounts(database)
                await _check(fleet, database, secrets, telemetry, with_texts=False)
                assert telemetry.found(MARK) == []
                await fleet.restart_gateway(explain_texts=True)
                await fleet.ready()
                await _check(fleet, database, secrets, telemetry, with_texts=True)
            finally:
                await database.close()
            log = fleet.services["decode-0"].log.read_text(errors="replace")
    assert "listening" in log and MARK not in log
    assert telemetry.found(MARK) == [] and "gen_ai" in telemetry.spans and "tandem.tokens" in telemetry.metrics


async def _accounts(database: Database) -> dict[str, str]:
    store, secrets = AccountStore(database), {"operator": OPERATOR}
    for name, scope in (("chief", "admin"), ("me", "inference"), ("you", "inference")):
        await store.create(name)
        _, secrets[name] = await store.create_token(name, "first", [scope])
    return secrets


async def _check(
    fleet: Fleet, database: Database, secrets: dict[str, str], telemetry: Telemetry, *, with_texts: bool
) -> None:
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False) as http:

        async def get(who: str, path: str) -> httpx.Response:
            return await http.get(path, headers={"authorization": f"Bearer {secrets[who]}"})

        async def is_closed() -> bool:  # a gateway learns of the first account within two seconds
            return (await http.get("/v1/models")).status_code == 401

        await until(is_closed, 30)
        mine = [await _asked(http, secrets["me"], stream=stream) for stream in (False, True)]
        refused = {**CHAT, "model": MARK}
        answer = await http.post("/v1/chat/completions", json=refused, headers=_bearer(secrets["me"]))
        assert answer.status_code == 404
        mine.append(answer.headers["x-request-id"])
        running = fleet.gateway.requests
        await until(lambda: running.num_running == 0, 10)
        await running.drain()

        # 1. The list, the metrics, the events and the fleet have it for nobody.
        for who in ("me", "you", "chief", "operator"):
            listed = (await get(who, "/v1/requests")).text
            assert MARK not in listed and (mine[0] in listed) == (who != "you")
        for path in ("/metrics", "/v1/events", "/v1/workers", "/v1/metrics/targets"):
            found = await get("operator", path)
            assert found.status_code == 200 and MARK not in found.text
        assert MARK not in json.dumps(running.newest(100)) and len(running.newest(100)) == 3

        # 2. Another account does not see the explanation; its own account does, with the texts if the setting is on.
        for request_id in mine:
            assert (await get("you", f"/v1/requests/{request_id}/explain")).status_code == 404
        for request_id in mine[:2]:
            found = await get("me", f"/v1/requests/{request_id}/explain")
            assert (MARK in found.text) == with_texts and (found.json()["texts"] is not None) == with_texts
            if with_texts:
                texts = found.json()["texts"]
                assert MARK in texts["prompt"] and texts["answer"], texts
        assert MARK not in (await get("me", f"/v1/requests/{mine[2]}/explain")).text

        # 3. The database has it in these documents only.
        rows = await _all_rows(database)
        having = {(table, row.get("request_id")) for table, row in rows if MARK in str(row)}
        assert having == ({("explanations", request_id) for request_id in mine[:2]} if with_texts else set())
        assert {"ledger", "explanations", "accounts"} <= {table for table, _ in rows}
        assert all(MARK not in row["summary"] for table, row in rows if table == "explanations")


def _bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", "x-tandem-explain": "1"}


async def _asked(http: httpx.AsyncClient, secret: str, *, stream: bool) -> str:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=_bearer(secret))
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


async def _all_rows(database: Database) -> list[tuple[str, dict[str, Any]]]:
    """Return every row of every table."""

    def read(connection: sa.Connection) -> list[tuple[str, dict[str, Any]]]:
        tables = metadata.sorted_tables
        return [(table.name, dict(row)) for table in tables for row in connection.execute(sa.select(table)).mappings()]

    return await database.run(read, single=True)
