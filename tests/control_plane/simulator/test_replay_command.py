"""`python -m control_plane replay` prints the figures of each policy as JSON, or says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog

from control_plane.replay_command import main
from control_plane.simulator.policies.names import POLICIES
from control_plane.simulator.profile_files import read_profile, written
from control_plane.simulator.profiles import h100_fleet
from control_plane.simulator.replay import Estimate
from control_plane.simulator.traces import line_of
from tests.control_plane.simulator.small_fleet import fleet, request


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, dict[str, float]]]:
    with structlog.testing.capture_logs():  # else a test's log is on stdout
        assert main(arguments) == 0
    policies: dict[str, dict[str, dict[str, float]]] = json.loads(capsys.readouterr().out)["policies"]
    return policies


def test_a_trace_on_twice_the_workers_is_served_sooner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "fleet.json"
    requests = [request(number, prompt=400, arrival=0.1 * number) for number in range(40)]
    trace.write_text("".join(f"{line_of(each)}\n" for each in requests))
    profile.write_text(written(fleet()))
    common = str(trace), "--profile", str(profile), "--policy", "least_requests"
    few, many = (
        replayed(capsys, *common, "--prefill", number, "--decode", "4")["least_requests"] for number in ("2", "6")
    )
    assert few["ttft_ms.p99"]["mean"] > 3 * many["ttft_ms.p99"]["mean"]
    assert few["ttft_ms.p99"]["half"] is None, "one run has no interval"


def test_several_policies_and_seeds_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(
        capsys, "agentic", "--requests", "60", "--workers", "4", "--load", "0.9", "--seeds", "2", "--gateways", "2",
        "--policy", "tandem", "--policy", "round_robin",
    )  # fmt: skip
    assert list(found) == ["tandem", "round_robin"]
    assert found["tandem"]["num_requests"]["mean"] == 48, "a fifth warms the caches up"
    assert found["tandem"]["ttft_ms.p50"]["half"] is not None


def test_admission_refuses_what_would_be_late_and_says_what_each_account_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "fleet.json"
    requests = [request(number, 30, 30, 0.02 * number, account="ab"[number % 5 == 0]) for number in range(600)]
    trace.write_text("".join(f"{line_of(each)}\n" for each in requests))
    profile.write_text(written(fleet(0, 1)))
    found = replayed(
        capsys, str(trace), "--profile", str(profile), "--policy", "tandem", "--policy", "tandem_admission",
        "--ttft-budget", "2", "--tpot-budget", "0.2",
    )  # fmt: skip
    with_it, without = found["tandem_admission"], found["tandem"]
    assert with_it["refused_share"]["mean"] > 0.5 and without["refused_share"]["mean"] == 0
    assert with_it["goodput_share"]["mean"] > 3 * without["goodput_share"]["mean"]
    assert with_it["accepted_met_share"]["mean"] > 0.9
    assert with_it["share.b"]["mean"] > 1.5 * without["share.b"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["{bad}"], "line 1 is not a request of a Mooncake trace"),
        (["{empty}"], "the trace has no requests"),
        (["agentic", "--workers", "4", "--prefill", "1"], "give --workers, or --prefill and --decode"),
        (["agentic", "--profile", "{bad}"], "bad.json is no fleet profile"),
        (["agentic", "--workers", "1", "--prefill", "-1"], "give --workers"),
        (["agentic", "--prefill", "-1"], "at least one decode worker"),
        (["agentic", "--requests", "5", "--load", "0"], "load must be more than 0"),
        (["agentic", "--profile", "{two}", "--policy", "llm_d"], "tell several models apart"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "bad.json").write_text("no trace\n")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "two.json").write_text(written(fleet(0, 2, models=("m", "n"))))
    files = {name: tmp_path / f"{name}.json" for name in ("bad", "empty", "two")}
    named = [argument.format_map(files) for argument in arguments]
    assert main(named) == 2
    assert said in capsys.readouterr().err


def test_a_profile_is_read_as_it_was_written_and_unknown_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(written(h100_fleet(2, 3)))
    assert read_profile(path) == h100_fleet(2, 3)
    path.write_text(written(h100_fleet(2, 3)).replace("step_ms", "stepms", 1))
    with pytest.raises(ValueError, match="no field 'stepms' of WorkerProfile"):
        read_profile(path)


def test_the_page_names_every_policy_and_its_profile_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/operate/what-if.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in POLICIES if f"`{name}`" not in rows] == []
    (tmp_path / "fleet.json").write_text(page.partition("```json\n")[2].partition("```")[0])
    profile = read_profile(tmp_path / "fleet.json")
    assert (profile.num_prefill, profile.decode) == (2, profile.prefill)


def test_an_interval_is_that_of_students_t() -> None:
    assert Estimate.of([1.0, 2.0, 3.0, 4.0, 5.0]).half == pytest.approx(1.963, abs=0.001)
    assert Estimate.of([1.0, 1.2]).is_above is False and Estimate.of([1.0, 1.001]).is_above
