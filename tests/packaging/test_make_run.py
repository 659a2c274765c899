"""The first `make run` ends with a sentence where something is missing, and works once it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_refused_before_it_reads_a_file_of_ours(tmp_path: Path) -> None:
    """Python 3.6 does not know the first statement of any of them."""
    python = tmp_path / "python3"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "sys.version_info, sys.modules['tandem_machine'] = (3, 6), None\n"
        "assert sys.argv[1] == '-c', f'something was started: {sys.argv}'\n"
        "exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    made = _make(tmp_path, python)
    assert made.returncode != 0
    assert made.stderr.startswith("Tandem needs Python 3.11 or newer; set PYTHON=python3.11\n"), made.stderr


def test_a_start_that_ended_before_there_was_a_pip_is_repeated(tmp_path: Path) -> None:
    """Python of Debian without its package python3-venv makes an environment without pip, and fails."""
    python = tmp_path / "python3"
    python.write_text(
        "#!/bin/sh\n"
        "if [ $1 = -c ]; then exit 0; fi\n"
        "mkdir -p .venv/bin; ln -sf /bin/true .venv/bin/python\n"
        "if [ ! -e python3-venv ]; then echo ensurepip is not available >&2; exit 1; fi\n"
        "ln -s /bin/true .venv/bin/pip\n"
    )
    python.chmod(0o755)
    made = _make(tmp_path, python)
    assert made.returncode != 0 and "ensurepip is not available" in made.stderr
    (tmp_path / "python3-venv").touch()
    made = _make(tmp_path, python)
    assert made.returncode == 0, made.stderr


def _make(folder: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Install in `folder` what `make run` needs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tandem_machine"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    command = ["make", ".venv/.run", f"PYTHON={python}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
