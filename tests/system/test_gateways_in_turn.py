"""One of two gateways is drained, then the other one is killed: no other stream is harmed, and the ledger is exact."""

from __future__ import annotations

from pathlib import Path

from tests.system.gateways_in_turn import Options, Run


async def test_one_gateway_may_drain_and_the_other_die_under_load(tmp_path: Path) -> None:
    """The short form of `make gateways`."""
    options = Options(((0, "drain"), (1, "kill")), starts_last_again=False, gone_seconds=2.0, think_seconds=0.1)
    verdict = await Run(options, tmp_path / "machine").run()
    assert verdict.problems == [], "\n".join(verdict.lines())
    drain, kill = verdict.turns
    assert (drain.what, drain.num_broken, kill.what) == ("drain", 0, "kill")
    assert drain.num_running and kill.num_running and kill.num_broken
