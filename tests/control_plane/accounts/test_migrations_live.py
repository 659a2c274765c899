"""Migrations run under a live gateway of the release before, and are taken back under it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane import migrate_command
from control_plane.accounts.service import Accounts
from control_plane.storage import migrate
from control_plane.storage.database import Database, database_url
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.accounts.gateway_process import GatewayProcess, gateway_on_standby, gateway_process
from tests.release import python_path, release_python, unpack

_RELEASE_HEAD = "0001"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("release"))


async def _migrate(url: str, state: Path, *flags: str) -> int:
    return await asyncio.to_thread(migrate_command.main, [*flags, "--database-url", url, "--state-dir", str(state)])


def _command(*flags: str, url: str, state: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the release before."""
    return subprocess.run(
        [release_python(), "-m", "control_plane", *flags, "--database-url", url, "--state-dir", str(state)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": python_path(root)},
        capture_output=True,
        text=True,
        check=False,
    )


async def _answer(gateway: GatewayProcess, token: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30) as http:
        headers = {"authorization": f"Bearer {token}"}
        body = {"model": "@tandem/demo", "prompt": "hello"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage


async def _num_closed(url: str, folder: Path) -> int:
    database = Database(database_url(url, folder))
    try:
        async with database.each() as connection:
            result = await connection.exec_driver_sql("SELECT count(*) FROM ledger WHERE closed_ms IS NOT NULL")
            return int(result.scalar_one())
    finally:
        await database.close()


@pytest.mark.timeout(300)
async def test_the_tables_change_under_a_gateway_of_the_release_before_and_change_back(
    url: str, tmp_path: Path, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway_on_standby(url) as first, gateway_on_standby(url) as second:  # they import meanwhile
        # 1. A gateway of the release before, with an account.
        made = _command("account", "create", "me", url=url, state=tmp_path, root=release)
        token = made.stdout.partition("token")[2].split()[0]
        async with gateway_process(url, root=release) as old:
            assert (await _answer(old, token))["completion_tokens"] > 0

            # 2. A gateway of this release migrates the tables; both serve.
            new = await first.begin()
            for gateway in (old, new, old, new):
                await _answer(gateway, token)
            assert await _migrate(url, tmp_path) == 0
            assert f"at revision {migrate.HEAD}" in capsys.readouterr().out

            # 3. Another gateway of the release before does not start with these tables, and says so.
            refused = _command("account", "list", url=url, state=tmp_path, root=release)
            assert refused.returncode == 2
            assert f"the database is at revision {migrate.HEAD}, this version needs {_RELEASE_HEAD}" in refused.stderr
            await new.end(signal.SIGTERM)

            # 4. The migrations are taken back under the old gateway: not by accident, then all of them.
            assert await _migrate(url, tmp_path, "--to", _RELEASE_HEAD) == 2
            assert "add --drop" in capsys.readouterr().err
            assert await _migrate(url, tmp_path, "--to", _RELEASE_HEAD, "--drop") == 0
            expected = f"the database went from revision {migrate.HEAD} back to {_RELEASE_HEAD}\n"
            assert capsys.readouterr().out.endswith(expected)
            await _answer(old, token)
            assert _command("account", "list", url=url, state=tmp_path, root=release).returncode == 0

            # 5. And forward again. All answers are in the ledger.
            new = await second.begin()
            for gateway in (old, new):
                await _answer(gateway, token)
            await new.end(signal.SIGTERM)
            await old.end(signal.SIGTERM)
    assert await _num_closed(url, tmp_path) == 8


async def test_what_cannot_be_taken_back_says_why(accounts: Accounts) -> None:
    with pytest.raises(InvalidRequest, match="there is no revision 9999; this version has 0001, 0002"):
        await migrate.take_back(accounts.database, "9999")
    assert await migrate.take_back(accounts.database, migrate.HEAD) == migrate.HEAD
    await migrate.take_back(accounts.database, "0002")
    with pytest.raises(InvalidRequest, match="at revision 0002, before 0003; start a gateway to migrate"):
        await migrate.take_back(accounts.database, "0003")
    await migrate.migrate(accounts.database)
    assert await migrate.current(accounts.database) == migrate.HEAD
