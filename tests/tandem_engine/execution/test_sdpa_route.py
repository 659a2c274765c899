"""The route of a GPU, here on the CPU, generates the tokens of `transformers.generate`.

Attention by SDPA over token-major blocks, decodes that share calls, sampling through one copy. Windows, groups of
layers, soft caps and experts come with the families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.execution.attention import ATTENTION_NAME, register
from tandem_engine.ops.sdpa_ops import SdpaOps
from tests.tandem_engine.execution.test_parity import KINDS, _greedy, _prompts, _reference
from tests.tandem_engine.fake_device.device_core import core_on


@pytest.mark.parametrize("kind", KINDS)
def test_the_route_of_a_device_equals_generate_in_chunks_and_among_neighbours(
    kind: str, make_checkpoint: Callable[[str], Path], generate: Callable[..., Any]
) -> None:
    register()
    folder, prompts = make_checkpoint(kind), _prompts([1, 15, 16, 33, 90])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    ).eval()
    core = core_on(torch.device("cpu"), model, SdpaOps(), max_num_batched_tokens=24)
    answers = generate(core, [(prompt, _greedy()) for prompt in prompts])
    assert answers == [_reference(folder, prompt) for prompt in prompts]
