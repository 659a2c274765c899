"""What holds for all tests."""

from __future__ import annotations

import pytest
import structlog
from hypothesis import settings

from tandem_runtime.garbage import forget_what_is_loaded

settings.register_profile("tandem", deadline=None)  # no test asserts wall-clock times
settings.load_profile("tandem")

_DEFAULTS = structlog.get_config()["processors"][:-1]
_RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


def pytest_collection_finish() -> None:
    """Exclude what is imported from collections, as services do: they would stop a gateway of this process for 1 s."""
    forget_what_is_loaded()


@pytest.fixture(autouse=True)
def _plain_tracebacks() -> None:
    """Log exceptions without local variables, as services do: structlog's default takes seconds for a deep one."""
    structlog.configure(processors=[*_DEFAULTS, _RENDERER])
