"""The plot of a training run shows what the run logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss_curve.__main__ import main, read_curve


def _run(folder: Path, rates: list[float], steps: list[int]) -> Path:
    folder.mkdir()
    records = [
        {"step": step, "loss": 4.0 / (1 + step), "num_tokens": 1000 * step, "learning_rate": rate}
        for step, rate in zip(steps, rates, strict=True)
    ]
    (folder / "loss.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_steps_logged_twice_count_once_and_a_falling_rate_is_a_cool_down(tmp_path: Path) -> None:
    run = read_curve(_run(tmp_path / "run", [0.1, 0.2, 0.2, 0.2], [1, 2, 3, 3]))
    assert run.num_tokens == (1000, 2000, 3000)
    assert not run.is_cool_down
    assert read_curve(_run(tmp_path / "cooled", [0.2, 0.1, 0.0], [3, 4, 5])).is_cool_down


def test_the_same_run_is_drawn_the_same(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [0.2, 0.2, 0.2], [1, 2, 3])
    for name in ("a.svg", "b.svg"):
        assert main([str(run), "--out", str(tmp_path / name)]) == 0
    drawn = (tmp_path / "a.svg").read_bytes()
    assert b"<svg" in drawn and drawn == (tmp_path / "b.svg").read_bytes()


def test_a_run_without_entries_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"run/loss\.jsonl holds no entries"):
        main([str(_run(tmp_path / "run", [], [])), "--out", str(tmp_path / "x.svg")])
