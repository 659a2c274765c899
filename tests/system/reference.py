"""What would transformers answer?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-3


@cache
def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(folder: Path, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return what `generate` answers, EOS ignored; asserts that no step was a close call (decision 23)."""
    model = load(folder)
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([list(token_ids)]),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=-1,
            pad_token_id=0,
        )
    for logits in answer.logits:
        best, second = logits[0].float().topk(2).values.tolist()
        assert best - second > MARGIN, "the reference is a close call; choose another prompt"
    tokens: list[int] = answer.sequences[0, len(token_ids) :].tolist()
    return tokens
