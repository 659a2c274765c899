"""Runs promtool: checks files, and unit tests of rules."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def require_prometheus(program: str = "promtool") -> str:
    """Return the path of promtool or prometheus; skip, with the reason, where it is not installed."""
    if found := shutil.which(program):
        return found
    reason = f"NO {program.upper()}: run make services, which installs Debian's package prometheus"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def promtool(arguments: Sequence[str], folder: Path) -> str:
    """Run promtool; return what it prints. Fails with that if promtool finds a problem."""
    done = subprocess.run(
        [require_prometheus(), *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed
