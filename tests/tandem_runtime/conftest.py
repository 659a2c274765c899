"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime folder of the test's own, with a path short enough for a Unix socket."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(folder))
    return folder
