"""A worker's keys follow from the gateway's hashes alone, and go on with the answer as the gateway would go on."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.admission import RequestRefused, build_request
from tandem_engine.scheduling.block_hash import BlockHash, HashChain, fold, hash_blocks, hash_root
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_runtime.errors import FingerprintMismatch, InvalidRequest
from tandem_runtime.kv import spaces
from tandem_worker.prompt_keys import take_hashes

SPACE, OTHER_SPACE = b"s" * 16, b"t" * 16
ROOT = hash_root(b"identity", 16, "", b"salt")


def a_submit(num_tokens: int, grain: int, **fields: Any) -> pb.Submit:
    hashes = hash_blocks(ROOT, range(num_tokens), grain)
    return pb.Submit(space=SPACE, hash_grain=grain, hash_root=ROOT, block_hashes=hashes, **fields)


def split(joined: bytes) -> list[bytes]:
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


@pytest.mark.parametrize(("grain", "block_size"), [(8, 8), (8, 16), (8, 32), (16, 16), (16, 32), (32, 32)])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 40, 63, 64, 100])
def test_hashes_become_the_keys_of_full_blocks(num_tokens: int, grain: int, block_size: int) -> None:
    submit, hashes = a_submit(num_tokens, grain), hash_blocks(ROOT, range(num_tokens), grain)
    chain = take_hashes(submit, SPACE, block_size)
    per_block = block_size // grain
    assert list(submit.block_hashes) == [spaces.fold(each, SPACE) for each in hashes[per_block - 1 :: per_block]]
    assert submit.hash_root == spaces.fold(ROOT, SPACE) and submit.hash_grain == 0
    num_hashed = num_tokens // grain * grain
    assert chain == messages.ChainEnd((hashes[-1] if hashes else ROOT).hex(), num_hashed, grain, SPACE.hex())


def test_counts_of_grains_become_counts_of_whole_blocks() -> None:
    submit = a_submit(128, 16, num_public_blocks=3, max_found_blocks=5, max_left_blocks=0)
    take_hashes(submit, SPACE, 32)
    assert (submit.num_public_blocks, submit.max_found_blocks, submit.max_left_blocks) == (1, 2, 0)
    unbounded = a_submit(128, 16)
    take_hashes(unbounded, SPACE, 32)
    assert not unbounded.HasField("max_found_blocks") and not unbounded.HasField("max_left_blocks")


def test_a_submit_of_release_0_2_stays_as_it_is() -> None:
    submit = pb.Submit(hash_root=ROOT, block_hashes=[b"k" * 16], num_public_blocks=3, max_left_blocks=5)
    before = submit.SerializeToString(deterministic=True)
    assert take_hashes(submit, SPACE, 32) is None
    assert submit.SerializeToString(deterministic=True) == before


def test_without_a_grain_there_is_a_hash_per_block() -> None:
    submit = a_submit(64, 32)
    submit.hash_grain = 0
    chain = take_hashes(submit, SPACE, 32)
    assert chain is not None and (chain.grain, chain.num_tokens, len(submit.block_hashes)) == (32, 64, 2)


def test_a_request_that_uses_no_cache_must_name_the_space_too() -> None:
    assert take_hashes(pb.Submit(space=SPACE, hash_grain=16), SPACE, 16) is None
    with pytest.raises(FingerprintMismatch):
        take_hashes(pb.Submit(space=OTHER_SPACE, hash_grain=16), SPACE, 16)


def test_another_space_is_refused_with_both_names() -> None:
    submit = a_submit(64, 16)
    with pytest.raises(FingerprintMismatch, match=f"{SPACE.hex()}.*{OTHER_SPACE.hex()}.*ask the next") as refused:
        take_hashes(submit, OTHER_SPACE, 16)
    assert refused.value.field == "space"
    assert submit == a_submit(64, 16), "nothing was replaced"


@pytest.mark.parametrize(("grain", "block_size"), [(16, 24), (32, 16), (2**32 - 1, 16)])
def test_a_grain_that_does_not_divide_the_block_is_refused_with_the_remedy(grain: int, block_size: int) -> None:
    submit = a_submit(64, 16)
    submit.hash_grain = grain
    with pytest.raises(FingerprintMismatch, match=f"{grain} tokens.*{block_size}.*--block-size") as refused:
        take_hashes(submit, SPACE, block_size)
    assert refused.value.field == "hash_grain"


@pytest.mark.parametrize("lengths", [(15, 17), (16, 0), (8,)])
def test_hashes_of_another_length_are_refused(lengths: tuple[int, ...]) -> None:
    submit = pb.Submit(space=SPACE, hash_root=ROOT, block_hashes=[bytes(length) for length in lengths])
    with pytest.raises(InvalidRequest, match="16 bytes"):
        take_hashes(submit, SPACE, 16)


def test_engine_and_gateway_fold_alike() -> None:
    for _ in range(100):
        block_hash, space = BlockHash(os.urandom(16)), os.urandom(16)
        assert fold(block_hash, space) == spaces.fold(block_hash, space)
        assert fold(fold(block_hash, space), space) == block_hash
    assert fold(ROOT, b"") == ROOT


def engine_request(submit: pb.Submit, token_ids: list[int], block_size: int) -> HashChain:
    """Return the engine's chain of a request that a worker with such blocks takes."""
    chain = take_hashes(submit, SPACE, block_size)
    keys = [each.hex() for each in submit.block_hashes]
    command = messages.AddRequest(
        "r",
        token_ids,
        len(token_ids),
        SamplingParams(max_tokens=4),
        hash_root=submit.hash_root.hex(),
        block_hashes=keys,
        chain=chain,
    )
    config = SchedulerConfig(num_blocks=100, block_size=block_size, context_length=3000, vocab_size=5000)
    request = build_request(command, config, arrival=0, added_ns=0)
    assert request.chain is not None
    return request.chain


@given(
    num_prompt_tokens=st.integers(1, 200),
    num_answer_tokens=st.integers(0, 200),
    num_public=st.integers(0, 12),
    grain=st.sampled_from([8, 16, 32]),
    blocks=st.integers(1, 4),
)
def test_keys_of_an_answer_are_those_of_the_next_turns_prompt(
    num_prompt_tokens: int, num_answer_tokens: int, num_public: int, grain: int, blocks: int
) -> None:
    """Also where the prompt begins with a public text, whose hashes are of another chain."""
    block_size = grain * blocks
    tokens = random.Random(1).choices(range(5000), k=num_prompt_tokens + num_answer_tokens)
    whole = hash_blocks(ROOT, tokens, grain)
    public = hash_blocks(hash_root(b"identity", 16, "", b"public"), tokens, grain)
    num_public = max(0, min(num_public, num_prompt_tokens // grain - 1))  # the prompt's last hash is never public
    of_prompt = [*public[:num_public], *whole[num_public : num_prompt_tokens // grain]]
    submit = pb.Submit(space=SPACE, hash_grain=grain, hash_root=ROOT, block_hashes=of_prompt)
    chain = engine_request(submit, tokens[:num_prompt_tokens], block_size)
    # 1. The engine makes the keys of the answer's blocks.
    keys = list(submit.block_hashes)
    while (len(keys) + 1) * block_size <= len(tokens):
        keys.append(chain.next_key(tokens, (len(keys) + 1) * block_size))
    # 2. A gateway hashes prompt and answer.
    of_turn = [*of_prompt, *whole[len(of_prompt) :]]
    assert keys == split(spaces.worker_keys(b"".join(of_turn), grain, block_size, SPACE))


@pytest.mark.parametrize(
    "chain",
    [
        messages.ChainEnd(ROOT.hex(), 0, 8, SPACE.hex()),  # behind the last block
        messages.ChainEnd(ROOT.hex(), 40, 3, SPACE.hex()),
        messages.ChainEnd(ROOT.hex(), 36, 8, SPACE.hex()),
        messages.ChainEnd(ROOT.hex(), 40, 0, SPACE.hex()),
        messages.ChainEnd(ROOT.hex(), 64, 8, SPACE.hex()),  # of another block
        messages.ChainEnd(ROOT.hex(), 40, 8, ""),
        messages.ChainEnd("", 40, 8, SPACE.hex()),
    ],
)
def test_the_engine_refuses_a_chain_that_fits_no_block(chain: messages.ChainEnd) -> None:
    command = messages.AddRequest(
        "r", list(range(50)), 50, SamplingParams(max_tokens=4), hash_root="00" * 16, block_hashes=["11" * 16]
    )
    config = SchedulerConfig(num_blocks=100, block_size=32, context_length=3000, vocab_size=5000)
    build_request(command, config, arrival=0, added_ns=0)
    with pytest.raises(RequestRefused):
        build_request(_with(command, chain), config, arrival=0, added_ns=0)


def _with(command: messages.AddRequest, chain: messages.ChainEnd) -> messages.AddRequest:
    return messages.AddRequest(
        command.request_id,
        command.token_ids,
        command.num_prompt_tokens,
        command.sampling,
        hash_root=command.hash_root,
        block_hashes=command.block_hashes,
        chain=chain,
    )
