"""Tests that `tandem up --engine vllm` finds vLLM's interpreter, or names the commands that make its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_client.cli.engines import vllm_python
from tandem_client.cli.plan import UpOptions, plan
from tandem_client.cli.up import CannotStart
from tests.tandem_client.test_plan import TWO_CORES


def make_program(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.touch(mode=0o700)
    return str(path)


def test_the_variable_comes_before_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_VLLM_PYTHON", raising=False)
    ours = make_program(tmp_path / "state" / "vllm" / "bin" / "python")
    assert vllm_python(tmp_path / "state") == ours
    theirs = make_program(tmp_path / "elsewhere" / "python")
    monkeypatch.setenv("TANDEM_VLLM_PYTHON", theirs)
    assert vllm_python(tmp_path / "state") == theirs


def test_without_an_environment_the_error_names_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_VLLM_PYTHON", raising=False)
    with pytest.raises(CannotStart) as caught:
        vllm_python(tmp_path)
    for words in (f"python3 -m venv {tmp_path}/vllm", "vllm==0.32.0", "llguidance==1.9.1", "TANDEM_VLLM_PYTHON"):
        assert words in str(caught.value)


def test_a_variable_that_names_no_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_VLLM_PYTHON", str(tmp_path))
    with pytest.raises(CannotStart, match=f"{tmp_path}, which is no program"):
        vllm_python(tmp_path)


def test_every_worker_but_no_encoder_gets_vllm() -> None:
    specs = plan(TWO_CORES, UpOptions(vllm_python="/opt/vllm/bin/python", embedding_models=("an-encoder",)))
    flags = ("--engine", "vllm", "--vllm-python", "/opt/vllm/bin/python")
    with_vllm = [spec.role for spec in specs if " ".join(flags) in " ".join(spec.command)]
    assert with_vllm == ["prefill", "decode"]
