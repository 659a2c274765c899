"""The kit for a card runs end to end on a CPU, in small; a part that fails takes no other along."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu_kit.__main__ import NO_CARD, card_environment, main
from benchmarks.gpu_kit.compare import equal_share, parity, steady_gaps
from benchmarks.gpu_kit.part import PARTS, Part, Result, Settings
from benchmarks.gpu_kit.runner import run_parts
from benchmarks.gpu_kit.verdict import at, bars, headline
from tandem_engine.settings import EngineConfig
from tandem_worker.settings import WorkerSettings

_SICK = "tests.benchmarks.sick_parts"


# ---------------------------------------------------------------------------------------------- the whole kit


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_part_runs_on_a_cpu_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kit.json"
    main(["--device", "cpu", "--json", str(file)])
    kit = json.loads(file.read_text())
    parts: dict[str, Any] = kit["parts"]
    assert list(parts) == [part.name for part in PARTS]
    flags = {
        "overlap": ("overlap", EngineConfig),
        "hand_over_ring": ("kv_staging_bytes", WorkerSettings),
        "hand_over_device": ("kv_region", WorkerSettings),
    }
    missing = {name: flag for name, (flag, settings) in flags.items() if flag not in settings.__annotations__}
    left_out = {"hand_over_device"} - missing.keys()
    states = {name: "failed" if name in missing else "left_out" if name in left_out else "done" for name in parts}
    assert {name: part["state"] for name, part in parts.items()} == states, _reasons(parts)
    assert all("--" + flag.replace("_", "-") in parts[name]["reason"] for name, flag in missing.items())

    figures = {name: part["figures"] for name, part in parts.items()}
    assert figures["limits"].keys() >= {"memory_read_gb_per_second", "launch_us", "to_card_pageable_gb_per_second"}
    # Here both sides are the same engine, whose tokens do not depend on the batch.
    assert figures["parity_demo"]["float32"]["equal_share"] == figures["parity_random"]["auto"]["equal_share"] == 1
    assert [figures["determinism"][f"batch_{batch}_against_batch_4"]["equal_bits_share"] for batch in (4, 2, 1)] == [
        1
    ] * 3
    assert figures["decode"]["batch_1"]["ratio"] > 0 and figures["decode"]["batch_4"]["ratio"] > 0
    assert figures["decode"]["transformers"]["dtype"] == figures["decode"]["ours"]["dtype"] == "float32"
    assert figures["prefill"]["ratio"] > 0 and figures["sampling"]["ratio"] > 0
    assert figures["hand_over"]["blocks_imported"] == 3 * 4 * 4  # three sets of 4 prompts of 64 tokens, in blocks of 16
    assert figures["hand_over"]["equal_tokens_share_asked_again"] == 1
    for role in ("prefill", "decode"):
        held = figures["host_memory"][role]
        assert held["pool_bytes"] < held["host_bytes"] < figures["host_memory"]["bound_bytes"]
    assert figures["kill"]["num_requests"] == 4 and figures["kill"]["num_failed"] == 0
    assert figures["kill"]["equal_tokens_share_asked_again"] == 1
    assert figures["kill"]["blocks_imported_afterwards"] >= 4 * 4

    assert kit["form"] == "cpu" and kit["bars"] == []  # a CPU is judged by other benchmarks
    printed = capsys.readouterr().out
    assert all(part.title in printed for part in PARTS)


def test_without_a_card_the_kit_says_why_and_tries_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "kit.json"
    assert main(["--json", str(file), "--device", "cuda:0"]) == NO_CARD
    assert list(json.loads(file.read_text())["parts"]) == ["card"]
    assert re.search(r"nothing was tried: NoCard: torch .*(without CUDA|finds no card)", capsys.readouterr().err)


# --------------------------------------------------------------------------------------------------- isolation


async def test_a_part_that_fails_dies_or_hangs_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    names = ("count", "again", "leave_out", "fail", "count", "die", "again", "hang", "count")
    parts = [Part(name, name, _SICK, 2 if name == "hang" else 60) for name in names]
    results: list[Result] = []
    settings = Settings("cpu", "cpu", tmp_path)
    variables = {"CUDA_VISIBLE_DEVICES": "7"}
    await run_parts(parts, settings, variables, 600, lambda part, result: results.append(result))
    assert [result.state for result in results] == [
        *("done", "done", "left_out", "failed", "done", "failed", "done", "failed", "done")
    ]
    assert [results[index].figures["num_runs"] for index in (0, 1, 4, 6, 8)] == [1, 2, 1, 1, 1]
    assert results[0].figures["variable"] == "7"
    assert results[2].reason == "this machine has no card"
    assert results[3].reason == "ValueError: the card is on fire"
    assert "Traceback" in results[3].log
    assert results[5].reason == "its process died" and "illegal memory access" in results[5].log
    assert results[7].reason == "was not done within its 2 s"
    left, child = (re.search(r"(left|child) (\d+)", results[index].log) for index in (5, 7))
    assert left is not None and child is not None
    assert not _runs(int(left[2])) and not _runs(int(child[2]))
    assert (tmp_path / "closed").exists()


async def test_parts_for_which_no_time_is_left_are_left_out(tmp_path: Path) -> None:
    results = await run_parts([PARTS[0]], Settings("cpu", "cpu", tmp_path), {}, 0.0, lambda part, result: None)
    assert results["card"].state == "left_out" and "--minutes" in results["card"].reason


# --------------------------------------------------------------------------------------------------- the device


@pytest.mark.parametrize(
    ("device", "visible", "chosen"),
    [
        ("cuda", None, "0"),
        ("cuda:0", "", ""),
        ("cuda:2", None, "2"),
        ("cuda:1", "5,3", "3"),
        ("cuda:0", "GPU-1a, MIG-2b", "GPU-1a"),
    ],
)
def test_one_card_is_visible_to_all_processes(device: str, visible: str | None, chosen: str) -> None:
    surroundings = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
    assert card_environment(device, surroundings) == expected


def test_a_card_beyond_the_visible_ones_is_refused() -> None:
    with pytest.raises(SystemExit, match="has 2 entries"):
        card_environment("cuda:2", {"CUDA_VISIBLE_DEVICES": "5,3"})
    with pytest.raises(SystemExit):
        main(["--device", "tpu"])


# --------------------------------------------------------------------------------------------------- pure parts


def test_answers_are_compared_to_their_end_and_differences_have_the_references_margin() -> None:
    reference = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    ours = [[1, 2, 3], [4, 50, 60], [70, 8, 9]]
    chosen = [[-0.1] * 3, [-0.1, -0.5, -0.1], [-0.2] * 3]
    tops: list[list[dict[int, float]]] = [[{}] * 3, [{}, {5: -0.5, 50: -0.75}, {}], [{7: -0.2}, {}, {}]]
    found = parity(ours, reference, chosen, tops)
    assert found["equal_share"] == pytest.approx(1 / 3)
    assert found["differences"] == [
        {"answer": 1, "token": 1, "margin": 0.25},
        {"answer": 2, "token": 0, "margin": None},
    ]
    assert (found["largest_margin"], found["num_beyond_top"]) == (0.25, 1)
    assert equal_share([1, 2, 3, 4], [1, 2, 0, 0]) == 0.5


def test_only_steps_of_the_whole_batch_count() -> None:
    early = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    late = [2.0, 3.0, 4.5, 5.0, 6.0, 100.0]  # 100: the early request has ended
    assert steady_gaps([early, late]) == [1.0, 1.5, 0.5, 1.0]
    with pytest.raises(ValueError, match="longer answers"):
        steady_gaps([early, [4.0, 5.0, 6.0]])


def test_a_full_run_is_judged_and_a_missing_figure_is_no_pass() -> None:
    figures: dict[str, Any] = {
        "decode": {"batch_1": {"ratio": 0.81}, "batch_32": {"ratio": 0.79}},
        "sampling": {"ratio": 1.3},
        "host_memory": {"prefill": {"host_bytes": 10}, "decode": {"host_bytes": 12}, "bound_bytes": 11},
        "kill": {"num_failed": 0},
    }
    results = {name: Result("done", 1.0, each) for name, each in figures.items()} | {"prefill": Result("failed")}
    met = {bar.text.partition(" =")[0]: bar.is_met for bar in bars(results)}
    assert met == {
        "decode at batch 1, of transformers' continuous batching": True,
        "decode at batch 32, of transformers' continuous batching": False,
        "prefill, of transformers' continuous batching: not measured": None,
        "a step with top-p, of a greedy one": True,
        "host bytes of the prefill worker, weights + 2 GiB": True,
        "host bytes of the decode worker, weights + 2 GiB": False,
        "answers that failed when prefill was killed": True,
    }


def test_figures_are_found_by_path_and_shown_shortly() -> None:
    assert at({"a": {"b": 2}}, "a.b") == 2 and at({"a": 1}, "a.b") is None
    result = Result("done", 1.0, {"batch_1": {"ratio": 0.81234}, "batch_32": {}})
    assert headline("decode", result) == "batch_1.ratio 0.8123"
    assert headline("decode", Result("failed", reason="ValueError: no\nmore")) == "ValueError: no"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reasons(parts: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {part['reason']}" for name, part in parts.items() if part["reason"]) + str(
        os.getloadavg()
    )
