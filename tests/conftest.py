"""What holds for all tests."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
import structlog

_DEFAULTS = structlog.get_config()["processors"][:-1]
_RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


@pytest.fixture(autouse=True)
def _plain_tracebacks() -> None:
    """Log exceptions without local variables, as services do: structlog's default takes seconds for a deep one."""
    structlog.configure(processors=[*_DEFAULTS, _RENDERER])


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    """Compile Tandem's modules, where they have changed: each of hundreds of processes would compile them again."""
    root = Path(__file__).parents[1]
    for folder in (*root.glob("tandem_*"), *root.glob("*_svc"), root / "control_plane", root / "protos" / "gen"):
        compileall.compile_dir(folder, quiet=2)
