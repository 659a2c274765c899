"""Measures the time to first token of a long prompt: uncached, in the store, and in prefill's pool.

In each round a fresh prompt, then one that has been asked before, twice. The prefill worker's pool holds one prompt and
little more, so the first time it comes from the host's store, the second time from the worker's own pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib.command import Outcome, Sheet, Target
from benchmarks.lib.memory_need import check_memory, kv_bytes_per_token
from benchmarks.lib.prompts import prompts
from benchmarks.lib.served import Served
from benchmarks.lib.stats import Answer, percentile
from benchmarks.lib.streaming import ask, new_client

NUM_PROMPT_TOKENS = 2048
TARGET_SHAPE = "0.5b"
MAX_RATIO = 0.1
_BLOCK_TOKENS = 16
_SPARE_BLOCKS = 4
_NUM_OUTPUT_TOKENS = 4
_STORED_PROMPTS = 4
_CACHED = ("from_store", "from_pool")
_ROLES = ("decode", "kv", "prefill")

Answers = Mapping[str, Sequence[Answer]]


async def ask_in_turn(model: Path, num_rounds: int, folder: Path) -> Answers:
    """Return the answers to uncached prompts, to one from the store and to one from the pool, `num_rounds` each."""
    check_memory(model, 2)
    num_pool_blocks = -(-(NUM_PROMPT_TOKENS + _NUM_OUTPUT_TOKENS) // _BLOCK_TOKENS) + _SPARE_BLOCKS
    store_bytes = _STORED_PROMPTS * NUM_PROMPT_TOKENS * kv_bytes_per_token(model)
    environment = {
        "TANDEM_BLOCK_SIZE": str(_BLOCK_TOKENS),
        "TANDEM_PREFILL_NUM_KV_BLOCKS": str(num_pool_blocks),
        "TANDEM_DECODE_NUM_KV_BLOCKS": str(num_pool_blocks),
        "TANDEM_KV_STORE_BYTES": str(max(1 << 20, store_bytes)),
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
    }
    source = prompts(model, NUM_PROMPT_TOKENS)
    known = next(source)
    answers: dict[str, list[Answer]] = {"uncached": [], "from_store": [], "from_pool": []}
    async with (
        Served(folder, ("--model", str(model)), environment, _ROLES) as served,
        new_client(served.base_url) as client,
    ):
        await ask(client, served.model, known, _NUM_OUTPUT_TOKENS)
        for fresh in itertools.islice(source, num_rounds):
            for name, prompt in zip(answers, (fresh, known, known), strict=True):
                answers[name].append(await ask(client, served.model, prompt, _NUM_OUTPUT_TOKENS))
    return answers


# -------------------------------------------------------------------------------------------------- pure from here on


def check(answers: Answers) -> None:
    """Raise RuntimeError unless each prompt was cached, but for its last block, or not at all, as it should be."""
    all_but_last = (NUM_PROMPT_TOKENS - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    wanted = {"uncached": 0, "from_store": all_but_last, "from_pool": all_but_last}
    for name, some in answers.items():
        found = {answer.num_cached_tokens for answer in some}
        if found != {wanted[name]}:
            raise RuntimeError(f"prompts {name} had {sorted(found)} cached tokens, not {wanted[name]}")


def add(outcome: Outcome, answers: Answers, shape: str) -> None:
    """Enter table, figures and target."""
    check(answers)
    seconds = {name: [answer.ttft_seconds for answer in some] for name, some in answers.items()}
    median = {name: percentile(some, 50) for name, some in seconds.items()}
    ratio = {name: median[name] / median["uncached"] for name in median}
    outcome.figures |= {f"cached.{name}.ttft_ms.p50": 1000 * median[name] for name in median}
    outcome.figures |= {f"cached.ratio.{name}_to_uncached": ratio[name] for name in _CACHED}
    rows = [
        (
            name,
            *(f"{1000 * value:.1f}" for value in (median[name], min(some), max(some))),
            f"{answers[name][0].num_cached_tokens}",
            f"{ratio[name]:.3f}",
        )
        for name, some in seconds.items()
    ]
    title = f"TTFT of a prompt of {NUM_PROMPT_TOKENS:,} tokens, random Llama {shape}, {len(answers['uncached'])} each"
    head = ("", "ms p50", "ms min", "ms max", "cached tokens", "of uncached")
    outcome.sheets.append(Sheet(title, head, rows))
    if shape != TARGET_SHAPE:  # what computing a small one's prompt takes is little beside everything else
        return
    outcome.targets += [
        Target(f"TTFT {name} = {ratio[name]:.3f} of uncached, at most {MAX_RATIO}", ratio[name] <= MAX_RATIO)
        for name in _CACHED
    ]
