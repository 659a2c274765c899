"""One fleet with its Prometheus, for all tests that need both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.alerts.promtool import require_prometheus
from tests.alerts.scene import Scene, open_scene


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    require_prometheus("prometheus")
    async with open_scene(tmp_path_factory.mktemp("alerts")) as opened:
        yield opened
