"""Replays recorded calls of vLLM: its batch's changes to the draw, and its steps to the core. See recorder.py.

With TANDEM_VLLM_PYTHON the recording is made again, and must be the same.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem_engine.demo import checkpoint_path
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.messages import AddRequest, RequestOutput, StepDone
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_vllm.core import VllmCore
from tandem_vllm.drawing import Drawer, RowRequest, RowUpdate
from tandem_vllm.steps import EngineStep, Pool, Run
from tandem_worker.vllm_program import vllm_program
from tests.tandem_vllm import recorder

FILE = Path(__file__).parent / "recorded" / "vllm-0.32.0.json"
PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
REQUESTS = {
    command.request_id: command
    for commands in recorder.COMMANDS.values()
    for command in commands
    if isinstance(command, AddRequest)
}
WHOLE = set(REQUESTS) - {"aborted"}


class ReplayedEngine:
    """vLLM as it was recorded."""

    def __init__(self, steps: Iterator[Mapping[str, Any]]) -> None:
        self._steps = steps
        self._last: Mapping[str, Any] = {"pool": [1, 1, 0, 0], "num_running": 0, "has_work": True}
        self.added: list[str] = []

    def prepare(self, request: Request) -> bool:
        return True

    def add(self, request: Request) -> None:
        self.added.append(request.request_id)

    def abort(self, request_id: str) -> None: ...

    @property
    def has_work(self) -> bool:
        return bool(self._last["has_work"])

    @property
    def num_running(self) -> int:
        return int(self._last["num_running"])

    @property
    def num_preempted(self) -> int:
        return 0

    @property
    def pool(self) -> Pool:
        return Pool(*self._last["pool"])

    def step(self) -> EngineStep:
        self._last = step = next(self._steps)
        sampled = {name: Sampled(token_id) for name, token_id in step["sampled"].items()}
        return EngineStep([Run(*run) for run in step["runs"]], sampled, [], frozenset(step["finished"]))


def replayed() -> list[StepDone]:
    """Return what the core makes of the recording."""
    recording = recorder.load(FILE)
    config = SchedulerConfig(recording.num_blocks, 32, 127, recorder.VOCAB_SIZE)
    core = VllmCore(config, ReplayedEngine(iter(recording.steps)))
    events: list[Any] = []
    for number in range(len(recording.steps)):
        for command in recorder.COMMANDS.get(number, ()):
            core.handle_some(command)
        core.run_step(events.append)
    assert not core.has_work()
    return [event for event in events if isinstance(event, StepDone)]


def outputs(done: list[StepDone]) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    for event in done:
        for output in event.outputs:
            found.setdefault(output.request_id, []).append(output)
    return found


def test_the_draw_follows_the_batch_of_vllm_through_chunks_preemptions_and_ends() -> None:
    """Each token that was drawn in vLLM is drawn again, from the rows that vLLM had then."""
    masks = GrammarMasks(lambda: Guide(checkpoint_path() / "tokenizer.json", recorder.VOCAB_SIZE, recorder.EOS))
    drawer, rows, answers = Drawer(masks), dict[int, str](), dict[str, list[int]]()
    kinds = {"added": 0, "removed": 0, "moved": 0}
    for step in recorder.load(FILE).steps:
        for added, removed, moved in step.get("updates", ()):
            changes = []
            for index, name, num_tokens, output in added:
                request = REQUESTS[name]
                answers[name] = list(output)
                assert num_tokens == len(request.token_ids), "vLLM keeps prompt and output apart"
                row = RowRequest(name, request.num_prompt_tokens, request.sampling)
                changes.append((index, row, request.token_ids, answers[name]))
            drawer.update(RowUpdate(changes, removed, [tuple(each) for each in moved]))
            kinds = {
                "added": kinds["added"] + len(added),
                "removed": kinds["removed"] + len(removed),
                "moved": kinds["moved"] + len(moved),
            }
        if not step["runs"]:
            continue
        rows = {index: row.request.request_id for index, row in drawer._rows.items()}
        assert sorted(rows) == list(range(step["num_rows"])), "a row of logits for each row of the batch"
        positions = [len(REQUESTS[rows[index]].token_ids) + len(answers[rows[index]]) for index in sorted(rows)]
        logits = torch.from_numpy(np.stack([recorder.logits_of(position) for position in positions]))
        drawn = drawer.draw(logits, set(step["sampled"]))
        assert {name: token.token_id for name, token in drawn.sampled.items()} == step["sampled"]
        largest = logits.argmax(-1).tolist()
        assert all(largest[index] == step["sampled"].get(name, largest[index]) for index, name in rows.items())
        for name, token_id in step["sampled"].items():
            answers[name].append(token_id)
    assert kinds["added"] > len(REQUESTS), "a preempted request is added again"
    assert kinds["removed"] and kinds["moved"]


def test_the_core_reports_what_vllm_computed() -> None:
    done = replayed()
    found = outputs(done)
    for name in WHOLE:
        request, last = REQUESTS[name], found[name][-1]
        assert last.is_last and last.finish_reason == ("stop" if name == "grammar" else "length")
        num_before = len(request.token_ids) - request.num_prompt_tokens
        assert last.num_generated_tokens == len(found[name]) == last.position - len(request.token_ids) + 1
        assert name == "grammar" or num_before + len(found[name]) == request.sampling.max_tokens
        assert last.num_computed_tokens + last.num_cached_tokens == request.num_prompt_tokens
    assert not found["aborted"][-1].is_last
    stats = done[-1].stats
    assert (stats.num_running, stats.num_waiting, stats.num_tokens_in_flight, stats.num_used_blocks) == (0, 0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks
    assert stats.counters["preemptions"] == sum(found[name][-1].num_preemptions for name in WHOLE) > 0
    assert stats.counters["tokens_generated"] == sum(len(each) for each in found.values())


def test_penalties_and_a_minimum_length_count_the_answer_before_the_move() -> None:
    """The request `moved` has five tokens of its answer in vLLM's prompt, and no end before 22 tokens."""
    moved = outputs(replayed())["moved"]
    assert [output.position for output in moved] == list(range(90, 110))
    assert len(moved) == REQUESTS["moved"].sampling.max_tokens - 5


@pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM")
def test_the_recording_is_what_vllm_does(tmp_path: Path) -> None:
    program = vllm_program(PYTHON, tmp_path)
    again = tmp_path / "again.json"
    command = [PYTHON, "-P", recorder.__file__, str(again)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": program.python_path}, check=True)
    assert recorder.load(again) == recorder.load(FILE)
