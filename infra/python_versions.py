"""`make test-versions`: runs the short suite with each supported Python of this machine, each in its own environment.

Looks on PATH and under pyenv. The short suite leaves out tests/system and the tests marked `slow` or `services`. Exit
code: 0 all passed, 1 some failed, 2 there is none of the versions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).resolve().parents[1]
_FOLDER = ROOT / "build" / "versions"
_SHORT = ("-q", "-m", "not slow and not services", "--ignore", "tests/system")


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = list(sys.argv[1:] if arguments is None else arguments) or list(VERSIONS)
    outcomes = {version: _test(version, find_python(version)) for version in wanted}
    print()
    for version, outcome in outcomes.items():
        print(f"Python {version}: {outcome}")
    if all(outcome == "not here" for outcome in outcomes.values()):
        print("none of these is on PATH or under pyenv; install one, such as `pyenv install 3.13`", file=sys.stderr)
        return 2
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def find_python(version: str) -> Path | None:
    """Return an interpreter of a version ("3.12") that starts: on PATH, else the newest under pyenv."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"), key=_patch, reverse=True)
    candidates = [*([Path(on_path)] if on_path else []), *installed]
    return next((python for python in candidates if _starts(python, version)), None)


def _patch(python: Path) -> int:
    digits = python.parents[1].name.rpartition(".")[2]
    return int(digits) if digits.isdigit() else -1


def _starts(python: Path, version: str) -> bool:
    """Whether this is the version: a shim of pyenv may be there for one that is not chosen."""
    asked = subprocess.run([str(python), "--version"], capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.startswith(f"Python {version}.")


def _test(version: str, python: Path | None) -> str:
    if python is None:
        return "not here"
    print(f"Python {version}: {python}", flush=True)
    started = time.monotonic()
    folder = _FOLDER / version
    own = folder / "bin" / "python"
    install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps: list[tuple[str, list[str]]] = [
        ("make its environment", [str(python), "-m", "venv", str(folder)]),
        ("install", [*install, "--constraint", "constraints.txt", "--editable", ".[dev]"]),
        ("pass", [str(own), "-m", "pytest", *_SHORT]),
    ]
    for what, command in steps:
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return f"failed to {what} after {time.monotonic() - started:.0f} s"
    return f"passed in {time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
