"""An operator admits, lists and revokes processes, rotates the authority and keeps a backup, with `tandem fleet`."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from control_plane.fleet_command import main
from control_plane.fleet_identity import backup as backup_module
from control_plane.fleet_identity.certificate_authority import CertificateAuthority
from control_plane.secrets import load_secret
from control_plane.storage.database import Database, database_url
from tandem_client.cli.app import app as tandem
from tandem_runtime.enrolment.join_token import JoinToken
from tests.control_plane.fleet_identity.world import new_key, request_of

HERE = Path(__file__).parents[3]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with capture_logs():
            code = main([*arguments, "--state-dir", str(tmp_path / "state")])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


async def join(state: Path, text: str) -> str:
    """Join as a process on another machine does, without the port between."""
    database = Database(database_url("", state))
    try:
        authority = CertificateAuthority(database, load_secret("", state))
        credential = JoinToken.parse(text).credential
        return (await authority.enrol(credential, "decode", request_of(new_key()), "machine-1")).identity.id
    finally:
        await database.close()


def test_a_token_is_printed_once_with_what_a_machine_needs(run: Run) -> None:
    code, shown, _ = run("token", "--role", "decode", "--expires", "30m", "--address", "gw:8644", "--uses", "4")
    assert code == 0
    facts = dict(line.split(None, 1) for line in shown.splitlines()[:6])
    token = JoinToken.parse(facts["token"])
    assert facts["role"] == "decode, 4 processes" and facts["addresses"] == "gw:8644"
    assert facts["authority"] == f"sha256:{token.authorities[0].hex()}"
    code, shown, _ = run("token", "--role", "kv", "--address", "gw:8644", "--address", "gw2:8644", "--json")
    document = json.loads(shown)
    assert JoinToken.parse(document["token"]).addresses == ("gw:8644", "gw2:8644")
    assert (document["role"], document["uses"]) == ("kv", 1)


def test_members_are_listed_and_revoked_and_authorities_rotated(run: Run, tmp_path: Path) -> None:
    token = json.loads(run("token", "--role", "decode", "--address", "a:1", "--json")[1])
    member = asyncio.run(join(tmp_path / "state", token["token"]))
    listed = run("list")[1]
    assert f"{member}  decode" in listed and "active" in listed and "machine-1" in listed
    assert "authority 1  issues" in listed
    assert run("rotate-ca")[0] == 0
    assert "does not trust the new authority yet" in run("list")[1]
    code, _, error = run("rotate-ca", "--switch")
    assert code == 2 and "1 members do not trust authority 2 yet" in error
    code, shown, _ = run("rotate-ca", "--switch", "--force")
    assert code == 0 and "authority 2 issues from now on; authority 1 leaves at" in shown
    assert run("rotate-ca", "--remove-old")[1] == "authority 1 is trusted no more\n"
    assert run("revoke", member)[:2] == (0, f"decode {member} is revoked (number 1 of the deny list)\n")
    facts = json.loads(run("list", "--json")[1])
    assert [each["state"] for each in facts["members"]] == ["revoked"]
    assert [each["number"] for each in facts["authorities"]] == [2]
    code, _, error = run("revoke", "nobody")
    assert code == 2 and "has no member 'nobody'; see `tandem fleet list`" in error


def test_a_backup_is_written_and_restored(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_module, "_SCRYPT", {"n": 2**10, "r": 8, "p": 1})
    (tmp_path / "passphrase").write_text("correct horse battery\nnot this\n")
    file, passphrase = str(tmp_path / "fleet.backup"), ["--passphrase-file", str(tmp_path / "passphrase")]
    before = json.loads(run("list", "--json")[1])
    code, shown, _ = run("backup", file, *passphrase)
    assert code == 0 and before["fleet"] in shown
    code, _, error = run("restore", file, *passphrase)
    assert code == 2 and "--replace" in error
    assert run("restore", file, *passphrase, "--replace")[0] == 0
    assert json.loads(run("list", "--json")[1]) == before
    code, _, error = run("backup", str(tmp_path / "other"), "--passphrase-file", str(tmp_path / "none"))
    assert code == 2 and "cannot read --passphrase-file" in error
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, _, error = run("backup", str(tmp_path / "other"))
    assert code == 2 and "pass --passphrase-file" in error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--role", "king", "--address", "a:1"], "must be one of prefill"),
        (["--role", "gateway", "--address", "a:1"], "joins without a token"),
        (["--role", "decode"], "no gateway has run with the state directory"),
        (["--role", "decode", "--address", "nowhere"], "1 of them malformed"),
        (["--role", "decode", "--address", "a:1", "--expires", "60d"], "30 days"),
    ],
)
def test_a_wrong_token_is_refused_by_name(run: Run, arguments: list[str], reason: str) -> None:
    code, shown, error = run("token", *arguments)
    assert (code, shown) == (2, "") and reason in error


def test_the_address_is_that_of_the_gateway_of_this_state_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state" / "join").mkdir(mode=0o700, parents=True)
    (tmp_path / "state" / "join" / "addresses").write_text("10.0.0.7:8644\ngateway:8644\n")
    code, shown, _ = run("token", "--role", "kv")
    assert code == 0 and "addresses  10.0.0.7:8644, gateway:8644" in shown and "this machine only" not in shown
    (tmp_path / "state" / "join" / "addresses").write_text("127.0.0.1:8644\n")
    assert "The address is of this machine only." in run("token", "--role", "kv")[1]
    monkeypatch.setenv("TANDEM_CONTROL_ENROLMENT_ADVERTISE", "public:8644")
    assert "addresses  public:8644\n" in run("token", "--role", "kv")[1]
    assert "addresses  given:1\n" in run("token", "--role", "kv", "--address", "given:1")[1]


def test_a_wrong_time_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("token", "--role", "decode", "--address", "a:1", "--expires", "soon")
    assert "soon is not a time; give a number and a unit" in capsys.readouterr().err


def test_another_secret_is_refused_in_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("list")[0] == 0
    monkeypatch.setenv("TANDEM_SECRET", "ab" * 32)
    code, _, error = run("list")
    assert code == 2 and "the secret of this control plane does not open" in error and error.count("\n") == 1


def test_tandem_hands_its_arguments_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tandem_client.cli", "fleet", "revoke", "nobody", "--state-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "has no member 'nobody'" in ended.stderr


def test_a_machine_without_the_control_plane_is_told_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = CliRunner().invoke(tandem, ["fleet", "list"])
    assert ended.exit_code == 1 and "run it on a gateway's machine" in ended.output
