"""A fleet whose processes die, stop and restart answers every request, token for token.

The short form of `make chaos` (docs/chaos.md); each run prints its own seed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.options import short
from tests.chaos.runner import Run


@pytest.mark.timeout(300)
async def test_a_storm_over_the_fleet_costs_no_request_and_no_token(tmp_path: Path) -> None:
    verdict = await Run(short(random.randrange(1 << 32)), tmp_path).run()
    report = "\n".join(verdict.lines())
    print(report)
    assert verdict.holds, report
