"""Answers prompts with vLLM alone, in vLLM's environment: `alone.py REQUEST.json ANSWERS.json`.

request    {"model", "settings" of `vllm.LLM`, "prompts", "num_tokens", "num_single"}
answers    {"tokens": [[...]], "margins": [[...]], "noise": x, "num_compared": n}

`margins` are the differences of the two largest log probabilities at each position. `noise` is the largest difference
of one log probability between a prompt in the batch of all prompts and the same prompt by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
import torch
from vllm import LLM, SamplingParams


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts at once, and then the first `num_single` of them one after another."""
    torch.set_num_threads(1)
    llm = LLM(asked["model"], **asked["settings"])
    prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["num_tokens"], ignore_eos=True, logprobs=2, detokenize=False
    )
    together = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
    llm.reset_prefix_cache()
    noise, num_compared = 0.0, 0
    for prompt, batched in zip(prompts[: asked["num_single"]], together, strict=False):
        (single,) = llm.generate([prompt], sampling, use_tqdm=False)
        found = list(zip(batched.logprobs, single.outputs[0].logprobs, batched.token_ids, strict=True))
        for (ours, other, token_id), taken in zip(found, single.outputs[0].token_ids, strict=True):
            if token_id in other:
                noise = max(noise, abs(ours[token_id].logprob - other[token_id].logprob))
                num_compared += 1
            if token_id != taken:
                break  # from here on the histories differ
    return {
        "tokens": [list(each.token_ids) for each in together],
        "margins": [[_margin(position) for position in each.logprobs] for each in together],
        "noise": noise,
        "num_compared": num_compared,
    }


def _margin(position: dict[int, Any]) -> float:
    best, second, *_ = sorted((each.logprob for each in position.values()), reverse=True)
    return float(best - second)


if __name__ == "__main__":
    answers = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answers))
    sys.stdout.flush()
    os._exit(0)  # the libraries that vLLM loads print pages about objects that an interpreter's end leaves behind
