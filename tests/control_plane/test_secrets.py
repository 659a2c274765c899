"""All processes of a state directory agree on one secret and on keys that differ by purpose and account."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.dispatch.block_hashes import cache_salt
from control_plane.secrets import handle_signer, kv_keys, load_secret
from control_plane.settings import ControlPlaneSettings
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.settings import describe

_LOAD = "import sys, pathlib; from control_plane.secrets import load_secret; sys.stdin.readline(); " + (
    "print(load_secret('', pathlib.Path(sys.argv[1])).hex())"
)


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:  # all have imported and wait; now they run
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    secrets = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert secrets == {load_secret("", folder).hex()}
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_a_configured_secret_is_used_and_nothing_is_written(tmp_path: Path) -> None:
    assert load_secret("ab" * 32, tmp_path) == bytes([0xAB]) * 32
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("secret", ["not hexadecimal", "ab" * 16])
def test_a_bad_secret_is_refused_with_the_remedy(secret: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="openssl rand -hex 32"):
        load_secret(secret, tmp_path)


def test_a_state_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="--state-dir"):
        load_secret("", tmp_path / "file" / "state")


def test_accounts_share_no_salt_and_salts_are_no_keys() -> None:
    secret = b"s" * 32
    keys = kv_keys(secret)
    made = {cache_salt(secret, "a"), cache_salt(secret, "b"), cache_salt(secret, "")}
    made |= {keys.link_key[:16], keys.mac_key[:16], keys.public_keys[0][:16]}
    assert len(made) == 6


def test_gateways_with_one_secret_sign_with_one_key() -> None:
    first, second, other = (handle_signer(secret) for secret in (b"s" * 32, b"s" * 32, b"t" * 32))
    assert first.public_key == second.public_key != other.public_key
    assert kv_keys(b"s" * 32).public_keys == (first.public_key,)
    assert b"s" * 32 not in (first.public_key, kv_keys(b"s" * 32).link_key)


def test_the_secret_is_never_shown() -> None:
    settings = ControlPlaneSettings(secret="ab" * 32)
    assert "abab" not in repr(settings) and describe(settings)["secret"] == "(set)"
