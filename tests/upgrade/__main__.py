"""Builds the release before into build/upgrade, and runs its processes beside this code's.

The environment has that release's own requirements (`constraints.txt` of its tree). It is built once, in some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from tests.release import COMMIT, PYTHON_VARIABLE, unpack

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "build" / "upgrade" / COMMIT[:12]
_TESTS = ("tests/system/test_upgrade.py", "tests/control_plane/accounts/test_migrations_live.py", "tests/recorded")


def main(arguments: list[str]) -> int:
    python = _environment()
    command = [sys.executable, "-m", "pytest", *(arguments or _TESTS)]
    return subprocess.run(command, cwd=_ROOT, env={**os.environ, PYTHON_VARIABLE: str(python)}, check=False).returncode


def _environment() -> Path:
    """Return the Python of the release's environment; make it if it is not there."""
    python = _FOLDER / "bin" / "python"
    if (_FOLDER / "complete").exists():
        return python
    print(f"Building the environment of {COMMIT[:12]} in {_FOLDER} (once; torch is most of it)", flush=True)
    shutil.rmtree(_FOLDER, ignore_errors=True)
    venv.create(_FOLDER, with_pip=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(Path(folder))
        flags = ["--quiet", "--disable-pip-version-check", "--constraint", str(tree / "constraints.txt")]
        subprocess.run([str(python), "-m", "pip", "install", *flags, *_requirements(tree)], check=True)
        # Its processes look for the version of the package.
        here = ["--no-deps", "--no-build-isolation", str(tree)]
        subprocess.run([str(python), "-m", "pip", "install", *flags, *here], check=True)
    (_FOLDER / "complete").touch()
    return python


def _requirements(tree: Path) -> list[str]:
    """Return what `tandem-serve[all,dev]` of the tree needs, without the tree itself."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    ours = [each for group in ("engine", "kv", "control", "client", "cli", "dev") for each in extras.get(group, [])]
    return [*project["dependencies"], *(each for each in ours if not each.startswith(project["name"]))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
