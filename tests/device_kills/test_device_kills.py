"""The short form of `python -m tests.device_kills`: each fault at each stage, twice."""

from __future__ import annotations

from tests.cuda_driver import stub_folder
from tests.device_kills.driver import FAULTS, run


async def test_nothing_leaks_and_nothing_torn_is_read_when_owners_and_readers_are_killed() -> None:
    tally = await run(2 * len(FAULTS), seed=1, driver_folder=stub_folder())
    assert tally.num_rests == 1
    assert tally.faults.total() == 2 * len(FAULTS) + tally.num_rests
    assert tally.outcomes["owner killed: read"] > 0, "memory outlives its owner while a reader copies"
