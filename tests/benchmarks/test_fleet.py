"""Policies are compared on equal arrivals, by intervals of their differences; Dynamo's router is asked over a pipe."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import structlog

from benchmarks.fleet.__main__ import main
from benchmarks.fleet.comparing import Compared, Kept, Run, compared, verdicts
from benchmarks.fleet.dynamo_policy import VARIABLE
from benchmarks.fleet.validation import Singles, arrivals_of, enter, profile_of
from benchmarks.lib.command import Outcome
from control_plane.simulator.outcome import Budgets
from control_plane.simulator.policies.tandem import TandemPolicy
from control_plane.simulator.profiles import h100_fleet
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.sources import MadeUpAgents
from control_plane.simulator.traces import TraceRequest

SELECTION_SERVICE = '''
import os

class SelectionService:
    """What the process asks of Dynamo, with the least booked tokens as the rule."""

    def __init__(self, indexer_threads):
        self.loads, self.booked, self.credit = {}, {}, os.environ.get("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", "1")

    async def upsert_worker(self, worker):
        assert worker["block_size"] == 256 and worker["total_kv_blocks"] > 1000
        self.loads[worker["worker_id"]] = 0

    async def select(self, request):
        worker = min(self.loads, key=lambda number: (self.loads[number], number))
        return {"worker_id": worker, "effective_prefill_tokens": request["isl_tokens"] - 7 * (self.credit == "1")}

    async def create_reservation(self, request):
        assert len(request["block_hashes"]) <= request["isl_tokens"] // 256
        self.booked[request["selection_id"]] = request["worker_id"], request["isl_tokens"]
        self.loads[request["worker_id"]] += request["isl_tokens"]

    async def prefill_complete(self, selection_id):
        assert selection_id in self.booked

    async def free_reservation(self, selection_id):
        worker, tokens = self.booked.pop(selection_id)
        self.loads[worker] -= tokens
'''


def run(num_gateways: int = 1) -> Run:
    return Run(h100_fleet(2, 2), MadeUpAgents(60), Budgets(), 0.8, num_gateways)


def test_runs_that_are_kept_are_not_run_again(tmp_path: Path) -> None:
    def compare(*policies: str) -> Compared:
        return compared("agents", run(), policies, range(2), lambda line: None, Kept(tmp_path, "2x60x1"))

    first = compare("round_robin")
    kept = sorted(tmp_path.iterdir())
    assert [path.name for path in kept] == [f"agents.2x60x1.load_0.8.seed_{seed}.round_robin.json" for seed in range(2)]
    kept[1].write_text(json.dumps({"ttft_ms.p99": -1.0}))
    second = compare("round_robin", "least_requests")
    assert second.by_policy["round_robin"]["ttft_ms.p99"] == [first.by_policy["round_robin"]["ttft_ms.p99"][0], -1.0]
    assert (
        second.by_policy["least_requests"]["ttft_ms.p99"]
        == compared("agents", run(), ["least_requests"], range(2), lambda line: None).by_policy["least_requests"][
            "ttft_ms.p99"
        ]
    )


def test_all_policies_get_the_same_requests() -> None:
    done = compared("agents", run(), ["tandem", "round_robin"], range(2), lambda line: None)
    numbers = [done.by_policy[policy]["num_requests"] for policy in ("tandem", "round_robin")]
    assert numbers == [[36, 36], [36, 36]]
    assert done.figures()["agents.load_0.8.tandem.num_requests"] == 36


def test_a_rival_is_better_only_if_the_whole_interval_of_its_differences_is() -> None:
    def of(ttft: list[float], goodput: list[float]) -> dict[str, list[float]]:
        return {"ttft_ms.p99": ttft, "goodput_per_second": goodput}

    ours = of([100.0, 200.0, 300.0], [10.0, 10.0, 10.0])
    always_sooner, sometimes_sooner = of([90.0, 189.0, 291.0], [9.0] * 3), of([90.0, 210.0, 290.0], [10.0] * 3)
    (met,) = verdicts([Compared("t", 0.9, {"tandem": ours, "rival": sometimes_sooner})])
    assert met.is_met and met.text == "t, load 0.9: better than Tandem by its interval: no rival"
    (missed,) = verdicts([Compared("t", 0.9, {"tandem": ours, "rival": always_sooner})])
    assert not missed.is_met and missed.text.endswith("rival (p99 TTFT)")
    (ours_alone,) = verdicts([Compared("t", 0.9, {"tandem": ours, "tandem_never": always_sooner})])
    assert ours_alone.is_met, "a variant of Tandem is no rival"


def test_dynamos_router_is_asked_for_prefill_and_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dynamo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_core.py").write_text(SELECTION_SERVICE)
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = compared("agents", run(num_gateways=2), ["dynamo"], [0], lambda line: None)
    found = done.by_policy["dynamo"]
    assert found["handed_over_share"] == [1.0]
    assert found["predicted_cached_share"][0] > 0, "of the prefill service"
    assert 1 < found["busiest_prefill"][0] < 2, "both prefill workers"


def test_a_process_without_dynamo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)Dynamo's process has ended: .*No module named 'dynamo'"):
        compared("agents", run(), ["dynamo"], [0], lambda line: None)


def test_the_command_writes_tables_figures_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    arguments = ["--quick", "--workers", "2", "--requests", "50", "--policies", "tandem", "least_requests"]
    with structlog.testing.capture_logs():
        assert main([*arguments, "--json", str(tmp_path / "f.json"), "--svg", str(tmp_path)]) == 0
    assert "left out: no TANDEM_DYNAMO_PYTHON" in capsys.readouterr().out
    assert "agents.load_0.9.least_requests.goodput_per_second" in (tmp_path / "f.json").read_text()
    assert (tmp_path / "fleet-agents.svg").read_text().count("<svg") == 1


def test_a_profile_gives_the_times_that_it_was_made_of() -> None:
    """Singles whose times follow from a known profile: 5 ms a step, 1 ms an answer, 0.5 ms a prompt token."""
    step, answer, prompt, square, overhead = 5.0, 1.0, 0.5, 0.0001, 7.0
    ttft = {
        length: overhead + -(-length // 512) * step + prompt * length + square * length**2 for length in (64, 256, 768)
    }
    singles = Singles(ttft, dict.fromkeys(ttft, step + answer), 9.0, 2 * (step + 3 * answer))
    profile = profile_of(singles, kv_tokens=10_000, bytes_per_token=100)
    worker = profile.prefill
    assert (worker.step_ms, worker.answer_ms, worker.context_ms) == pytest.approx((step, answer, 0.0))
    assert (worker.prompt_ms, worker.prompt_context_ms) == pytest.approx((prompt, 2 * square))
    assert profile.gateway_seconds == pytest.approx(overhead / 1000)
    assert profile.hand_over_seconds == pytest.approx(0.003)
    alone = [TraceRequest(0, 0.0, 768, 9, block_tokens=16)]
    (found,) = Simulation(profile, [TandemPolicy(profile, 1, hand_over="always")], alone).run()
    assert 1000 * found.ttft_seconds == pytest.approx(ttft[768])


def test_arrivals_take_the_wanted_share_of_the_engines_core() -> None:
    singles = Singles({64: 40.0, 256: 140.0, 768: 400.0}, {64: 6.0, 256: 6.0, 768: 6.0}, 9.0, 16.0)
    profile = profile_of(singles, 100_000, 100)
    arrivals = arrivals_of(profile, 2000, seed=1)
    worker = profile.prefill
    steps = sum(each.num_output_tokens - 1 + -(-each.num_prompt_tokens // 512) for each in arrivals)
    busy = sum(worker.prompt_seconds(each.num_prompt_tokens, 0) for each in arrivals)
    busy += steps * (worker.step_ms + worker.answer_ms) / 1000
    assert busy / arrivals[-1].arrival == pytest.approx(0.6, rel=0.1)


def test_the_simulator_is_judged_by_both_percentiles() -> None:
    outcome = Outcome()
    singles = Singles({64: 40.0, 256: 140.0, 768: 400.0}, {64: 6.0, 256: 6.0, 768: 6.0}, 9.0, 16.0)
    enter(outcome, profile_of(singles, 100_000, 100), [100.0] * 99 + [500.0] * 2, [110.0] * 99 + [700.0] * 2)
    assert [target.is_met for target in outcome.targets] == [True, False]
