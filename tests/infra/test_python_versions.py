"""`make test-versions` finds interpreters that start, and says which passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import python_versions as versions


def _interpreter(path: Path, version: str, code: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho Python {version}\nexit {code}\n")
    path.chmod(0o755)


def test_a_python_is_found_on_the_path_or_under_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert versions.find_python("3.99") is None
    for patch in ("3.99.2", "3.99.10"):
        _interpreter(tmp_path / "pyenv" / "versions" / patch / "bin" / "python", patch)
    # 1. The newest under pyenv, also if a shim is on PATH for a version that is not chosen.
    newest = tmp_path / "pyenv" / "versions" / "3.99.10" / "bin" / "python"
    assert versions.find_python("3.99") == newest
    _interpreter(tmp_path / "bin" / "python3.99", "", code=127)
    assert versions.find_python("3.99") == newest
    # 2. One on PATH that starts comes first.
    _interpreter(tmp_path / "bin" / "python3.99", "3.99.1")
    assert versions.find_python("3.99") == tmp_path / "bin" / "python3.99"


def test_without_any_version_the_exit_code_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert versions.main(["3.98", "3.99"]) == 2


def test_one_failure_fails_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"3.11": "passed in 9 s", "3.12": "failed to pass after 9 s", "3.13": "not here"}
    monkeypatch.setattr(versions, "find_python", lambda version: None)
    monkeypatch.setattr(versions, "_test", lambda version, python: outcomes[version])
    assert versions.main([]) == 1
    assert "Python 3.13: not here" in capsys.readouterr().out
    outcomes["3.12"] = "not here"
    assert versions.main([]) == 0
