"""Runs whole steps of every family on the fake device, and prints what happened, as JSON by family.

    python -m tests.tandem_engine.fake_device.steps [FAMILY...]

A process of its own: torch cannot take a registered device back.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tandem_engine.core import EngineCore
from tandem_engine.execution.attention import ATTENTION_NAME, register
from tandem_engine.messages import AddRequest, Refused
from tandem_engine.ops.choice import choose_ops
from tandem_engine.sampling_params import SamplingParams
from tests.tandem_engine.fake_device import device as fake
from tests.tandem_engine.fake_device.device_core import core_on
from tests.tandem_engine.models import test_routes
from tests.tandem_engine.models.lean import kinds

FAMILIES = {**test_routes.CONFIGS, **kinds.CONFIGS}
_ASKS = (  # (tokens of the prompt, sampling): see `run`
    (8, SamplingParams(max_tokens=2, temperature=0.0)),
    (40, SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=5)),
)


def run(family: str, device: torch.device, mode: fake.FakeDevice) -> list[list[str]]:
    """Run requests to their end and return the synchronisations of each step.

    Step 1 has a whole prompt, whose row is greedy, and a first chunk. Step 2 has a decode, a greedy row too, and a
    later chunk beyond the windows of 16 tokens, whose row is not greedy.
    """
    core = _core(FAMILIES[family](), device)
    for index, (num_tokens, sampling) in enumerate(_ASKS):
        answer = core.handle(AddRequest(str(index), list(range(2, 2 + num_tokens)), num_tokens, sampling))
        assert not any(isinstance(event, Refused) for event in answer), answer
    steps, num_tokens = [], 0
    while core.has_work():
        with mode.recording() as synchronisations:
            num_tokens += sum(len(output.token_ids) for output in core.step().outputs)
        steps.append(list(synchronisations))
    assert num_tokens == sum(sampling.max_tokens for _, sampling in _ASKS), f"{num_tokens} tokens were sampled"
    return steps


def _core(config: Any, device: torch.device) -> EngineCore:
    register()
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    ops = choose_ops("auto", device, torch.bfloat16, 1, lambda what: print(what, file=sys.stderr))
    return core_on(device, model.eval().requires_grad_(False).to(device), ops, max_num_batched_tokens=32)


def _mistakes(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return what a test of the CPU cannot find."""
    ours = torch.ones(4, device=device)
    return {
        "mismatch": lambda: ours + torch.ones(4),
        "item": lambda: ours[0].item(),
        "tolist": lambda: ours.tolist(),
        "if": lambda: bool(ours[0] > 0),
        "nonzero": lambda: ours.nonzero(),
        "mask": lambda: ours[ours > 0],
        "download": lambda: ours.cpu(),
        "upload": lambda: torch.ones(4).to(device),
        "tensor": lambda: torch.tensor([1, 2], device=device),
        "nothing": lambda: torch.ones(4).to(device, non_blocking=True) + ours,
    }


def _outcome(run: Callable[[], object]) -> object:
    """Return what `run` returns, or the text of its exception: the test that reads it fails, the others go on."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - the test shows it
        return "".join(traceback.format_exception(error))


def _num_synchronisations(mistake: Callable[[], object], mode: fake.FakeDevice) -> int:
    with mode.recording() as synchronisations:
        mistake()
    return len(synchronisations)


def main(families: list[str]) -> None:
    device = fake.register()
    with fake.use() as mode:
        mistakes = {
            name: _outcome(partial(_num_synchronisations, each, mode)) for name, each in _mistakes(device).items()
        }
        steps = {family: _outcome(partial(run, family, device, mode)) for family in families or FAMILIES}
    print(json.dumps({"mistakes": mistakes, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1:])
