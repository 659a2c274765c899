"""The ratios of quotas and of services started by hand are those of turns; what cannot be measured is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cores import quota
from benchmarks.cores.__main__ import add_by_hand, add_quota
from benchmarks.cores.by_hand import beside_decode, commands
from benchmarks.cores.quota import QuotaRefused, Speeds, one_core_of_quota
from benchmarks.lib.command import Outcome
from tandem_machine.cgroups import Cgroup


def test_a_quota_is_compared_turn_by_turn_with_the_affinity() -> None:
    """The machine becomes half as fast after two turns: the ratios do not change."""
    speeds = {
        "affinity": Speeds([100, 100, 50, 50], [10, 10, 5, 5]),
        "quota": Speeds([95, 95, 47.5, 47.5], [8, 8, 4, 4]),
        "quota_ignored": Speeds([50, 50, 25, 25], [1, 1, 0.5, 0.5]),
    }
    outcome = Outcome()
    add_quota(outcome, speeds)
    assert outcome.figures["quota.prefill.quota.ratio"] == pytest.approx(0.95)
    assert outcome.figures["quota.decode.quota_ignored.ratio"] == pytest.approx(0.1)
    assert [(target.text.split()[0], target.is_met) for target in outcome.targets] == [
        ("prefill", True),
        ("decode", False),
    ]


def test_services_by_hand_are_compared_with_tandem_up() -> None:
    outcome = Outcome()
    add_by_hand(outcome, {"up": [100, 200, 100], "by_hand": [96, 192, 96]})
    assert outcome.figures["by_hand.by_hand.ratio"] == pytest.approx(0.96)
    assert [target.is_met for target in outcome.targets] == [True]


def test_an_interval_that_is_too_wide_meets_no_target() -> None:
    outcome = Outcome()
    add_by_hand(outcome, {"up": [100, 100, 100], "by_hand": [50, 100, 150]})
    assert [target.is_met for target in outcome.targets] == [False]
    assert "no result" in outcome.targets[0].text


def test_the_services_by_hand_are_started_with_the_commands_of_the_page() -> None:
    """Beside the flags of the page, the gateway gets free ports. All but the engine of decode is on the other core."""
    page = Path("docs/operate/machines.md").read_text().partition("## By hand on one machine")[2].partition("```\n")[2]
    taskset, *of_core = beside_decode((0, 1))
    beside = [Path(taskset).name, *of_core, "python", "-m"]
    lines = [line.split() for line in page.partition("```")[0].splitlines() if "python -m" in line]
    assert all(line[:5] == beside for line in lines)
    assert {line[5]: line[6:] for line in lines} == commands(8642, 8643, "@tandem/demo", (0, 1))


@pytest.mark.parametrize("groups", [[], [Cgroup(Path("/sys/fs/cgroup"), 2)]])
def test_a_machine_without_a_quota_of_version_1_says_so(monkeypatch: pytest.MonkeyPatch, groups: list[Cgroup]) -> None:
    monkeypatch.setattr(quota, "cgroups", lambda controller: iter(groups))
    with pytest.raises(QuotaRefused, match="no cgroup of version 1"), one_core_of_quota():
        pass


def test_the_cgroup_has_a_quota_of_one_core_and_goes_with_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "cgroups", lambda controller: iter([Cgroup(tmp_path, 1)]))
    with one_core_of_quota() as folder:
        files = {file.name: file.read_text() for file in folder.iterdir()}
        for file in folder.iterdir():  # the kernel's files go with their folder
            file.unlink()
    assert files == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    assert not folder.exists()
