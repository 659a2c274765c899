"""Tandem says where it runs, and elsewhere ends with that sentence instead of a traceback."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_client.cli.plan import UpOptions
from tandem_client.cli.up import CannotStart, check_options
from tandem_machine.platforms import unsupported

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("system", "processor", "runs"),
    [
        ("linux", "x86_64", True),
        ("linux", "aarch64", True),
        ("linux", "riscv64", False),
        ("darwin", "arm64", False),
        ("win32", "AMD64", False),
    ],
)
def test_up_ends_with_a_sentence_where_tandem_does_not_run(
    monkeypatch: pytest.MonkeyPatch, system: str, processor: str, runs: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    if runs:
        assert unsupported() == ""
        check_options(UpOptions())
    else:
        with pytest.raises(CannotStart, match="runs on Linux, x86-64 or arm64; this is"):
            check_options(UpOptions())


def test_make_run_ends_with_the_same_sentence_before_it_installs_anything(tmp_path: Path) -> None:
    """`make` is run with a python3 that says it is on macOS."""
    python = tmp_path / "python3"
    python.write_text(
        f"#!{sys.executable}\n"
        "import platform, sys\n"
        "sys.platform, platform.machine, platform.system = 'darwin', lambda: 'arm64', lambda: 'Darwin'\n"
        "assert sys.argv[1] == '-c', f'something was started: {sys.argv}'\n"
        "exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tandem_machine"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = subprocess.run(
        ["make", "run", f"PYTHON={python}"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert made.returncode != 0 and not (tmp_path / ".venv").exists()
    assert "Tandem runs on Linux, x86-64 or arm64; this is Darwin on arm64" in made.stderr


def test_the_readme_says_where_tandem_runs() -> None:
    assert "Linux (x86-64 or arm64)" in (ROOT / "README.md").read_text()
