"""Reference answers, by transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-3
torch.set_num_threads(1)  # two that wait for each other beside a fleet's processes take ten times as long


def greedy(folder: Path, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return what `generate` answers, EOS ignored; asserts that no step was a close call (decision 23)."""
    tokens, margin = _greedy(folder, tuple(token_ids), num_tokens)
    assert margin > MARGIN, f"a step of the reference was won by {margin}; choose another prompt"
    return tokens


def clear_prompt(folder: Path, length: int, num_tokens: int, first_seed: int = 0) -> list[int]:
    """Return a random prompt whose greedy answer has no close call in it; always the same one.

    Prompts of different seeds begin differently: a prompt cache has nothing of one for the other.
    """
    for seed in count(first_seed):
        prompt = random.Random(seed).choices(range(3, 300), k=length)
        if _greedy(folder, tuple(prompt), num_tokens)[1] > MARGIN:
            return prompt
    raise AssertionError("unreachable")


def prompt_logprobs(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """Return the log probability of every token but the first, after those before it."""
    with torch.inference_mode():
        logits = _model(folder)(torch.tensor([token_ids])).logits[0, :-1].double()  # [len - 1, vocab_size]
    found = logits.log_softmax(dim=-1).gather(1, torch.tensor(token_ids[1:])[:, None])
    return [float(logprob) for logprob in found[:, 0]]


@cache
def _model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@cache
def _greedy(folder: Path, token_ids: tuple[int, ...], num_tokens: int) -> tuple[list[int], float]:
    """Return the tokens, and the smallest lead of a best logit over the second."""
    with torch.inference_mode():
        answer = _model(folder).generate(
            torch.tensor([token_ids]),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best_two = torch.stack([logits[0].float() for logits in answer.logits]).topk(2).values  # [num_tokens, 2]
    return answer.sequences[0, len(token_ids) :].tolist(), float((best_two[:, 0] - best_two[:, 1]).min())
