"""The next turn of a conversation finds the earlier turn, answer included, whatever the grain of the hashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_engine.core import EngineCore
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks, hash_root
from tandem_runtime.kv.spaces import worker_keys
from tandem_worker import convert
from tandem_worker.prompt_keys import take_hashes

SPACE = b"s" * 16
ROOT = hash_root(b"identity", 16, "", b"an account")
PUBLIC_ROOT = hash_root(b"identity", 16, "", b"public")
NUM_ANSWER_TOKENS = 60


def hashes_of(tokens: list[int], grain: int, num_public: int) -> list[BlockHash]:
    """Return a gateway's hashes: the leading ones of a public text are of another chain."""
    return [*hash_blocks(PUBLIC_ROOT, tokens, grain)[:num_public], *hash_blocks(ROOT, tokens, grain)[num_public:]]


def run(
    core: EngineCore, name: str, tokens: list[int], grain: int, block_size: int, num_public: int
) -> tuple[list[int], int, list[str]]:
    """Run a request through the worker's conversion; return the answer, the tokens found, and the keys reported."""
    submit = pb.Submit(
        request_id=name,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=pb.SamplingParams(max_tokens=NUM_ANSWER_TOKENS, top_p=1, repetition_penalty=1),
        hash_root=ROOT,
        block_hashes=hashes_of(tokens, grain, num_public),
        hash_grain=grain,
        space=SPACE,
    )
    chain = take_hashes(submit, SPACE, block_size)
    core.handle(convert.add_request(submit, name, "aggregated", chain))
    answer: list[int] = []
    keys: list[str] = []
    num_cached = 0
    while core.has_work():
        done = core.step()
        for output in done.outputs:
            answer += output.token_ids
            num_cached = max(num_cached, output.num_cached_tokens)
        keys += [key for filled in done.filled for key in filled.hashes]
    return answer, num_cached, keys


@pytest.mark.parametrize(("grain", "block_size"), [(8, 8), (8, 16), (16, 16), (8, 32), (16, 32), (32, 32)])
@pytest.mark.parametrize("num_tokens", [47, 64, 83])
@pytest.mark.parametrize("is_public", [False, True])
def test_an_answers_second_turn_hits(
    make_engine: Callable[..., Any], grain: int, block_size: int, num_tokens: int, is_public: bool
) -> None:
    core = make_engine("llama", block_size=block_size, num_kv_blocks=64).core
    prompt = [random.Random(num_tokens).randrange(3, 300) for _ in range(num_tokens)]
    num_public = max(0, num_tokens // grain - 1) if is_public else 0
    # 1. The first turn is computed, and its blocks are reported under the keys that the gateway expects.
    answer, num_cached, keys = run(core, "first", prompt, grain, block_size, num_public)
    turn = [*prompt, *answer]
    assert (len(answer), num_cached) == (NUM_ANSWER_TOKENS, 0)
    num_full = (len(turn) - 1) // block_size  # the last token's KV is not computed
    expected = worker_keys(b"".join(hashes_of(turn, grain, num_public)), grain, block_size, SPACE)
    assert "".join(keys) == expected[: 16 * num_full].hex()
    # 2. The next turn computes only what is new.
    _, num_cached, _ = run(core, "second", [*turn, 5, 6, 7], grain, block_size, num_public)
    assert num_cached == num_full * block_size
    core.scheduler.pool.check()
