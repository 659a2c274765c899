"""Tests that a model with windows in all layers answers the same from a pool that drops blocks behind them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem_engine.core import EngineCore
from tandem_engine.messages import AddRequest, RequestOutput
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks
from tests.checkpoints import WINDOW

BLOCK = 4
ROOT = BlockHash(bytes(16))


def prompts() -> list[list[int]]:
    """Return eight prompts; every other one continues the one before."""
    rng = random.Random(5)
    result = []
    for length in (70, 33, 90, 12):
        prompt = [rng.randrange(3, 300) for _ in range(length)]
        result += [prompt, [*prompt, *(rng.randrange(3, 300) for _ in range(9))]]
    return result


def answers(core: EngineCore, drain: Callable[[EngineCore], list[RequestOutput]], num_at_once: int) -> list[list[int]]:
    """Run the prompts in groups, and return 40 tokens of each."""
    result = []
    asks = prompts()
    for start in range(0, len(asks), num_at_once):
        of_request: dict[str, list[int]] = {}
        for index, prompt in enumerate(asks[start : start + num_at_once]):
            hashes = [block_hash.hex() for block_hash in hash_blocks(ROOT, prompt, BLOCK)]
            ask = SamplingParams(max_tokens=40, seed=index + start)
            of_request[str(index)] = []
            core.handle(AddRequest(str(index), prompt, len(prompt), ask, hash_root=ROOT.hex(), block_hashes=hashes))
        for output in drain(core):
            of_request[output.request_id] += output.token_ids
        result += list(of_request.values())
    return result


@pytest.mark.parametrize("num_at_once", [1, 4])
def test_answers_are_the_same_though_blocks_behind_the_window_hold_others_tokens(
    num_at_once: int, make_engine: Callable[..., Any], drain: Callable[[EngineCore], list[RequestOutput]]
) -> None:
    expected = answers(make_engine("mistral", block_size=BLOCK, num_kv_blocks=1024).core, drain, num_at_once=1)
    counters = {}
    for window in (None, WINDOW):
        small = make_engine("mistral", block_size=BLOCK, num_kv_blocks=36).core
        core = EngineCore(replace(small.scheduler.config, window=window), small.runner)
        assert answers(core, drain, num_at_once) == expected
        core.scheduler.pool.check()
        stats = core.scheduler.stats()
        assert stats.num_used_blocks == 0
        counters[window] = stats.counters
    if num_at_once == 1:  # each second prompt finds what the first left of its window
        assert counters[WINDOW]["prompt_tokens_cached"] > 0
    else:  # more run side by side
        assert counters[WINDOW]["steps"] < 0.5 * counters[None]["steps"]
        assert (counters[WINDOW]["preemptions"], counters[None]["preemptions"] > 0) == (0, True)
