"""The field's own tools do their tasks against Tandem, unchanged; those that are large do so in `make tools`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.lib.served import Served
from tests.tools import environments
from tests.tools.catalogue import TOOLS, Tool
from tests.tools.runs import do, serving

SMALL = [tool for tool in TOOLS if tool.is_small]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    missing = [tool.name for tool in SMALL if environments.program(tool) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}; run `make services`"
        if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    async with serving(tmp_path_factory.mktemp("tools")) as served:
        yield served


@pytest.mark.parametrize("tool", SMALL, ids=lambda tool: tool.name)
async def test_the_tool_does_its_task_and_no_request_is_refused(tool: Tool, served: Served, tmp_path: Path) -> None:
    outcome = await do(tool, served, tmp_path / tool.name)
    assert not outcome.problem, f"{outcome.problem}\n{outcome.said}"
    assert outcome.recorder is not None and outcome.recorder.calls.total() > 0
