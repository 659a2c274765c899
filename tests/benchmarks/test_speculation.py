"""The speculation benchmark sends both sides the same requests, and notices a different answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation import __main__
from benchmarks.speculation.__main__ import Prompt, Task, main, measured
from tests.tandem_engine.scheduling.harness import EngineHarness
from tests.tandem_engine.scheduling.test_drafted_steps import Script


def harness_of(speculation: str, wrong: bool = False) -> EngineHarness:
    harness = EngineHarness(max_draft_tokens=8 if speculation == "auto" else 0, drafter=Script(3))
    if wrong and speculation == "auto":
        harness.runner.stop_positions = {6}
    return harness


@pytest.mark.parametrize("turns_are_steps", [False, True])
def test_tokens_behind_the_first_and_their_steps_are_counted(turns_are_steps: bool) -> None:
    prompts = [Prompt([1, 2, 3], max_tokens=9), Prompt([4, 5], max_tokens=5)]
    task = Task("t", prompts, 0.0, 1.5, turns_are_steps=turns_are_steps)
    off, auto = measured(task, lambda speculation: harness_of(speculation).core)
    assert (off.num_tokens, off.num_steps, off.num_drafted) == (12, 12, 0)
    assert (auto.num_tokens, auto.num_drafted, auto.num_accepted) == (12, 9, 9)
    assert auto.num_steps == 3


@pytest.mark.parametrize("turns_are_steps", [False, True])
def test_another_answer_ends_the_measurement(turns_are_steps: bool) -> None:
    prompts = [Prompt([1, 2, 3], max_tokens=9, stop_token_ids=(99,))]
    task = Task("t", prompts, 0.0, 1.5, turns_are_steps=turns_are_steps)
    with pytest.raises(RuntimeError, match="t-0: with guesses the answer is another one"):
        measured(task, lambda speculation: harness_of(speculation, wrong=True).core)


def test_a_quick_run_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(is_quick: bool, progress: Any) -> Any:
        yield "@tandem/demo", [Task("copying", __main__._held_out("copying", 2), 0.0, 1.5)]

    monkeypatch.setattr(__main__, "_tasks", tasks)
    file = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["copying.accepted_tokens"] <= figures["copying.draft_tokens"]
    assert figures["copying.off_tokens_per_second"] > 0
