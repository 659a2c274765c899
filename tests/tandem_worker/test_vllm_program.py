"""Tests how a worker starts vLLM as its engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_engine.client import Program
from tandem_worker.settings import WorkerSettings
from tandem_worker.vllm_program import vllm_program


def test_vllm_gets_only_the_packages_that_it_needs(tmp_path: Path) -> None:
    """An older link, of another version at the same place, is replaced."""
    program = vllm_program("/opt/vllm/bin/python", tmp_path)
    folder = Path(program.python_path)
    assert program.command == ("/opt/vllm/bin/python", "-P", "-m", "tandem_vllm")
    assert sorted(link.name for link in folder.iterdir()) == ["tandem_engine", "tandem_machine", "tandem_vllm"]
    (folder / "tandem_vllm").unlink()
    (folder / "tandem_vllm").symlink_to(tmp_path / "gone")
    assert vllm_program("/opt/vllm/bin/python", tmp_path) == program
    assert (folder / "tandem_vllm" / "core.py").is_file()


def test_the_settings_choose_the_engine_and_refuse_half_of_a_choice(tmp_path: Path) -> None:
    settings = WorkerSettings(engine="vllm", vllm_python=sys.executable, engine_args="--quantization 'fp8' --x='a b'")
    assert settings.engine_config(str(tmp_path), "r").engine_args == ("--quantization", "fp8", "--x=a b")
    assert settings.engine_program(str(tmp_path)).command[0] == sys.executable
    assert WorkerSettings().engine_program(str(tmp_path)) == Program.own()
    with pytest.raises(ValueError, match="--vllm-python '/nowhere/python' is no file"):
        replace(settings, vllm_python="/nowhere/python")
    with pytest.raises(ValueError, match="take --engine vllm"):
        replace(settings, engine="tandem")
    with pytest.raises(ValueError, match="No closing quotation"):
        replace(settings, engine_args="--x 'a").engine_config(str(tmp_path), "r")
