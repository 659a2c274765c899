"""Records what vLLM calls and returns while requests come, wait, are preempted, are aborted and end.

Run with vLLM's interpreter as a file: `recorder.py FILE.json`. Its tests are in test_recorded_calls.py. The model's
logits are replaced by those of `logits_of`, so that a replay needs no model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tandem_engine.grammar import Grammar
from tandem_engine.messages import AbortRequest, AddRequest
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

VOCAB_SIZE = 3072
EOS = (0, 2)
CONFIG = EngineConfig(
    "@tandem/demo",
    num_threads=1,
    dtype="float32",
    max_model_len=127,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_kv_blocks=12,  # of 16 tokens: 6 of vLLM's, fewer than two requests of 100 tokens take in the end
)
COMMANDS: dict[int, list[AddRequest | AbortRequest]] = {
    0: [
        AddRequest("greedy", list(range(3, 73)), 70, SamplingParams(30, temperature=0.0)),
        AddRequest("seeded", list(range(80, 100)), 20, SamplingParams(20, seed=2**63, temperature=1.3, top_p=0.9)),
        AddRequest("aborted", list(range(300, 330)), 30, SamplingParams(40, temperature=0.0)),
        AddRequest(
            "penalties",
            list(range(100, 170)),
            70,
            SamplingParams(24, seed=4, frequency_penalty=1.5, repetition_penalty=1.4, logit_bias={9: 4.0}),
        ),
    ],
    2: [
        AddRequest("moved", list(range(200, 290)), 85, SamplingParams(25, seed=6, temperature=0.9, min_tokens=22)),
        AddRequest("waiting", list(range(400, 410)), 10, SamplingParams(3, temperature=0.0, num_logprobs=2)),
    ],
    9: [AbortRequest("aborted")],
    20: [
        AddRequest(
            "grammar",
            list(range(500, 512)),
            12,
            SamplingParams(12, seed=8, grammar=Grammar("regex", "a{3}[xyz]{4}b"), stop_token_ids=EOS),
        )
    ],
}
"""What is asked before each step."""
NUM_STEPS = 150
"""More than the requests take."""


def logits_of(position: int) -> Any:
    """Return logits [VOCAB_SIZE], float32, for the token at this position: the same with every release of numpy."""
    mixed = (np.arange(VOCAB_SIZE, dtype=np.uint64) + np.uint64(7919 * position)) * np.uint64(2654435761)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519) >> np.uint64(8) & np.uint64(0xFFFF)
    return (mixed.astype(np.float64) / 5000).astype(np.float32)


class Recording(msgspec.Struct):
    """One run, step by step."""

    version: str
    """Of vLLM."""
    num_blocks: int
    steps: list[dict[str, Any]]


def main(file: Path) -> None:
    """Run the requests and write the recording."""
    import torch
    import vllm

    from tandem_vllm.assembly import assemble
    from tandem_vllm.sampling import TandemDraw, _row_update

    step: dict[str, Any] = {}
    update_state, apply = TandemDraw.update_state, TandemDraw.apply

    def recorded_update(draw: TandemDraw, batch_update: Any) -> None:
        if batch_update is not None:
            changes = _row_update(batch_update)
            added = [[index, row.request_id, len(prompt), list(output)] for index, row, prompt, output in changes.added]
            step.setdefault("updates", []).append(
                [added, list(changes.removed), [list(each) for each in changes.moved]]
            )
        update_state(draw, batch_update)

    def recorded_apply(draw: TandemDraw, logits: Any) -> Any:
        for index, row in draw._drawer._rows.items():
            row.read_output()
            logits[index] = torch.from_numpy(logits_of(row.request.num_tokens))
        step["num_rows"] = len(logits)
        return apply(draw, logits)

    setattr(TandemDraw, "update_state", recorded_update)  # noqa: B010
    setattr(TandemDraw, "apply", recorded_apply)  # noqa: B010
    core, ready, _ = assemble(CONFIG, lambda *_: None, None)
    engine: Any = core._engine  # type: ignore[attr-defined]
    run = engine.step

    def recorded_step() -> Any:
        step.clear()
        found = run()
        step["runs"] = [list(each[:3]) for each in found.runs]
        step["sampled"] = {name: token.token_id for name, token in found.sampled.items()}
        step["finished"] = sorted(found.finished)
        step["pool"], step["num_running"], step["has_work"] = list(engine.pool), engine.num_running, engine.has_work
        return found

    engine.step = recorded_step
    steps: list[dict[str, Any]] = []
    for number in range(NUM_STEPS):
        while core.is_held():
            core.begin_turn()  # a grammar is being compiled
        for command in COMMANDS.get(number, ()):
            core.handle_some(command)
        while core.is_held():
            core.begin_turn()
        if core.has_work():
            core.run_step(lambda _: None)
            steps.append(json.loads(json.dumps(step)))
        elif number > max(COMMANDS):
            break
    recording = Recording(vllm.__version__.split("+")[0], ready.num_blocks, steps)  # type: ignore[attr-defined]
    file.write_bytes(msgspec.json.encode(recording))


def load(file: Path) -> Recording:
    return msgspec.json.decode(file.read_bytes(), type=Recording)


def commands_at(number: int) -> Sequence[AddRequest | AbortRequest]:
    return COMMANDS.get(number, ())


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the libraries that vLLM loads print pages about objects that an interpreter's end leaves behind
