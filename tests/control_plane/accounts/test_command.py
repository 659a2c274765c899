"""An operator creates the first account beside the database, and does the rest with `tandem`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from control_plane.account_command import main
from control_plane.accounts.service import Accounts
from control_plane.api.http.request_context import HttpSettings
from control_plane.app import create_app
from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.text.text_service import TextService
from tandem_client.cli.app import app as tandem
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.api.gateway import Fleet, Ready
from tests.control_plane.api.model import OneModel, description
from tests.control_plane.api.scripted_dispatcher import ScriptedDispatcher
from tests.tandem_client.serving import serve

HERE = Path(__file__).parents[3]


def secret_in(text: str) -> str:
    (secret,) = [word for word in text.split() if word.startswith("tdm_")]
    return secret


def test_the_first_account_gets_an_admin_token_the_others_do_not(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", "root", "--database-url", url]) == 0
    first = capsys.readouterr().out
    assert "account  root" in first and "scopes   inference, usage, admin" in first and secret_in(first)
    assert main(["create", "me", "--database-url", url, "--expires-days", "1"]) == 0
    assert "scopes   inference, usage\n" in capsys.readouterr().out
    assert main(["token", "me", "--database-url", url, "--scopes", "admin"]) == 0
    assert "scopes   admin\n" in capsys.readouterr().out
    assert main(["disable", "me", "--database-url", url]) == 0
    assert main(["list", "--database-url", url]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["me  (disabled)", "root"]
    assert main(["create", "me", "--database-url", url]) == 2
    assert "account me already exists" in capsys.readouterr().err


def test_it_is_a_command_of_the_control_plane(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "control_plane", "account", "create", "me", "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("account  me\n") and secret_in(ended.stdout)
    assert (tmp_path / "tandem.db").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="cannot keep the database in"):
        Database(database_url(f"sqlite:///{tmp_path}/none/tandem.db", tmp_path))


def test_a_token_that_cannot_be_made_makes_no_account(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--scopes", "bogus"], ["--token-name", ""], ["--expires-days", "9999999"], ["--expires-days", "-1"]):
        assert main(["create", "me", "--database-url", url, *wrong]) == 2
    assert "scopes has bogus" in capsys.readouterr().err
    assert main(["list", "--database-url", url]) == 0 and capsys.readouterr().out == ""


def test_the_first_account_may_come_before_the_gateways_first_start(tmp_path: Path) -> None:
    folder = tmp_path / "none" / "yet"
    assert main(["create", "me", "--state-dir", str(folder)]) == 0
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "tandem.db").stat().st_mode & 0o777 == 0o600


def test_who_stands_beside_the_database_is_told_what_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--database-url", "postgresql://me:secret@127.0.0.1:1/x"]) == 2
    error = capsys.readouterr().err
    assert "me:***@127.0.0.1:1/x cannot be used" in error and "--database-url" in error


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_state_folder_of_somebody_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finding 28: whoever owns the folder could replace the secret and the database."""
    (foreign := tmp_path / "foreign").mkdir()
    os.chown(foreign, 12345, 12345)
    with pytest.raises(InvalidRequest, match=r"owner: 12345.*--state-dir"):
        Gateway(ControlPlaneSettings(state_dir=str(foreign)))
    assert main(["list", "--state-dir", str(foreign)]) == 2
    assert "owner: 12345" in capsys.readouterr().err


def test_a_state_folder_is_closed_to_others(tmp_path: Path) -> None:
    (folder := tmp_path / "open").mkdir(mode=0o755)
    Gateway(ControlPlaneSettings(state_dir=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_beyond_loopback_a_gateway_needs_an_account(tmp_path: Path) -> None:
    addresses = {"listen": "0.0.0.0:0", "grpc_listen": "127.0.0.1:0"}
    settings = ControlPlaneSettings(**addresses, insecure=True, state_dir=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"0\.0\.0\.0:0 is beyond loopback.*account create NAME"):
        await Gateway(settings).run(asyncio.Event())
    assert await asyncio.to_thread(main, ["create", "me", "--state-dir", str(tmp_path)]) == 0
    gateway, drain = Gateway(settings), asyncio.Event()
    running = asyncio.create_task(gateway.run(drain))
    await asyncio.wait([running, started := asyncio.create_task(gateway.started.wait())], return_when="FIRST_COMPLETED")
    assert started.done(), running
    drain.set()
    assert await running == 0


@contextmanager
def administered(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    """A gateway with one account; yields its address and the admin's token."""
    assert main(["create", "root", "--state-dir", str(folder)]) == 0
    catalog, dispatcher = OneModel(description()), ScriptedDispatcher()
    accounts = Accounts(database_url("", folder))
    app = create_app(TextService(catalog, dispatcher), catalog, Fleet(), Ready(), HttpSettings(), accounts)
    with serve(app) as url:
        yield url, secret_in(capsys.readouterr().out)


def test_tandem_makes_accounts_tokens_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with administered(tmp_path, capsys) as (url, secret):
        monkeypatch.setenv("TANDEM_TOKEN", secret)
        monkeypatch.setenv("TANDEM_BASE_URL", url)

        def run(*arguments: str, code: int = 0) -> str:
            ended = CliRunner().invoke(tandem, list(arguments))
            assert ended.exit_code == code, ended.output
            return ended.output

        assert "requests per minute: 60" in run("account", "create", "team", "--requests-per-minute", "60")
        assert "account team already exists" in run("account", "create", "team", code=1)
        changed = run("account", "limit", "team", "--requests-per-minute", "none", "--concurrent-requests", "4")
        assert "requests per minute: none" in changed and "concurrent requests: 4" in changed
        assert "give a whole number" in run("account", "limit", "team", "--tokens-per-minute", "many", code=1)
        assert "(disabled)" in run("account", "disable", "team")
        assert "(disabled)" not in run("account", "enable", "team")
        assert "team" in run("account", "list") and "root" in run("account", "list")
        made = run("token", "create", "team", "--name", "ci", "--scopes", "inference").strip()
        (token,) = json.loads(run("token", "list", "team", "--json"))
        assert token["name"] == "ci" and token["scopes"] == ["inference"]
        monkeypatch.setenv("TANDEM_TOKEN", made)
        assert f"token {token['id']} is active" in run("token", "verify")
        assert "needs the scope admin" in run("token", "list", "team", code=1)
        monkeypatch.setenv("TANDEM_TOKEN", secret)
        rolled = run("token", "roll", "team", token["id"]).strip()
        assert rolled.startswith("tdm_") and rolled != made
        assert "is revoked" in run("token", "revoke", "team", token["id"])
        monkeypatch.setenv("TANDEM_TOKEN", rolled)
        assert "is revoked" in run("token", "verify", code=1)


@pytest.mark.parametrize("days", ["nan", "inf", "soon"])
def test_days_that_are_none_are_refused(days: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["create", "me", "--state-dir", str(tmp_path), "--expires-days", days])
    assert "--expires-days" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
