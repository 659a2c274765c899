"""The code of the release before, unpacked from the repository's history."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

COMMIT = "da99e1a09d648718156686610f4dc4b5ae98cff3"  # v0.2.0; a clone may have no tags
PYTHON_VARIABLE = "TANDEM_RELEASE_PYTHON"
"""Names the Python of the release's own environment, which `make upgrade-test` builds."""
_ROOT = Path(__file__).resolve().parents[1]


def unpack(folder: Path) -> Path:
    """Write the release's tree into `folder`; skip the test if the history is not here."""
    archive = folder / "code.tar"
    made = subprocess.run(
        ["git", "archive", "-o", str(archive), COMMIT], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"the code of {COMMIT} is not here; fetch the whole history: {made.stderr.strip()}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return folder


def python_path(root: Path) -> str:
    """Return the PYTHONPATH with which a tree's code is imported."""
    return os.pathsep.join((str(root), str(root / "protos" / "gen")))


def release_python() -> str:
    """Return the Python that runs the release's code: of its own environment, else this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


needs_environment = pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE), reason="needs the release's own environment: make upgrade-test"
)
