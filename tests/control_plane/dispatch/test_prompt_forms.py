"""Each kind of worker gets the prompt in its form, and no form lets two accounts share an answer's blocks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.dispatch.block_hashes import INLINE_TOKENS, hash_prompt, wire_prompt
from control_plane.dispatch.prompt_forms import PromptForms
from control_plane.generation import TokenIds, TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.kv.spaces import worker_keys

IDENTITY = b"i" * 16
GRAIN = 4
SPACE = b"s" * 16


def card(block_size: int = GRAIN, *, takes_spaces: bool = True, digest: bytes = b"f" * 16) -> pb.ModelCard:
    fingerprint = pb.Fingerprint(digest=digest)
    return pb.ModelCard(model_id="m", fingerprint=fingerprint, block_size=block_size, takes_spaces=takes_spaces)


def request(num_tokens: int) -> TokenRequest:
    sampling = SamplingParams(max_tokens=9)
    return TokenRequest("r", "me", "m", TokenIds(range(num_tokens)), sampling, (0,), deadline=time.monotonic() + 60)


def forms(num_tokens: int, num_public: int = 0, salt: bytes = b"salt", **changes: Any) -> PromptForms:
    asked = request(num_tokens)
    hashes = hash_prompt(IDENTITY, asked.token_ids, salt, b"tag", num_public, GRAIN)
    return PromptForms(asked, replace(hashes, **changes))


def test_workers_that_take_spaces_share_one_form_whatever_their_class_and_block_size() -> None:
    prompt = forms(40)
    assert prompt.of(card()) is prompt.of(card(8, digest=b"g" * 16)) is prompt.of(card(16))
    hashes = prompt.of(card()).hashes
    assert hashes is not None
    assert list(hashes.blocks) == hash_blocks(hash_root(IDENTITY, GRAIN, "", b"salt"), range(40), GRAIN)
    submit = pb.Submit.FromString(prompt.of(card()).wire)
    assert list(submit.token_ids) == list(range(40)) and list(submit.block_hashes) == list(hashes.blocks)


def test_release_0_2_has_the_hashes_of_its_fingerprint_and_block_size_and_counts_its_own_blocks() -> None:
    prompt = forms(40, 20, max_found_blocks=5, max_left_blocks=3)
    old = prompt.of(card(8, takes_spaces=False))
    assert old is prompt.of(card(8, takes_spaces=False)) is not prompt.of(card(16, takes_spaces=False))
    assert old.hashes is not None
    whole = hash_blocks(hash_root(b"f" * 16, 8, "", b"salt"), range(40), 8)
    assert old.hashes.root == hash_root(b"f" * 16, 8, "", b"salt") and list(old.hashes.blocks[2:]) == whole[2:]
    counts = old.hashes.num_public_blocks, old.hashes.max_found_blocks, old.hashes.max_left_blocks
    assert counts == (2, 2, 1) and old.hashes.account_tag == b"tag"
    assert list(old.hashes.after_prompt(range(40), [7] * 8)) == hash_blocks(whole[-1], [7] * 8, 8)


def test_without_hashes_every_worker_gets_the_token_ids_alone() -> None:
    prompt = PromptForms(request(40), None)
    assert prompt.of(card()) is prompt.of(card(takes_spaces=False)) and prompt.of(card()).hashes is None
    assert not pb.Submit.FromString(prompt.of(card()).wire).block_hashes


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([1, 2, 3, 4, 8]), st.lists(st.just(7), max_size=40))
def test_no_two_accounts_share_a_block_of_an_answer_whatever_the_workers_block_size(
    num_tokens: int, num_public: int, num_grains: int, answer: list[int]
) -> None:
    """A worker goes on from its own last whole block, which may end before the last hash."""
    size = GRAIN * num_grains

    def private_keys(salt: bytes) -> list[bytes]:
        hashes = forms(num_tokens, num_public, salt).of(card(size)).hashes
        assert hashes is not None
        keys = worker_keys(hashes.blocks.packed, GRAIN, size, b"")
        blocks = [keys[place : place + 16] for place in range(0, len(keys), 16)]
        parent = blocks[-1] if blocks else hashes.root
        rest = [*range(num_tokens)][len(blocks) * size :] + answer
        generated = hash_blocks(parent, rest, GRAIN)[num_grains - 1 :: num_grains]  # type: ignore[arg-type]
        # The engine's chain goes on as the gateway's does.
        gateways = list(hashes.with_answer(range(num_tokens), answer))
        assert generated == gateways[num_grains - 1 :: num_grains][len(blocks) :]
        return [*blocks[hashes.num_public_blocks // num_grains :], *generated]

    mine, theirs = private_keys(b"mine"), private_keys(b"theirs")
    assert len(mine) == len(theirs) and not set(mine) & set(theirs)


def test_a_prompt_that_is_hardly_more_than_a_public_text_has_no_public_blocks_for_large_blocks() -> None:
    prompt = forms(13, 12)
    small, large = prompt.of(card(4)).hashes, prompt.of(card(8)).hashes
    assert small is not None and large is not None
    assert (small.num_public_blocks, large.num_public_blocks) == (2, 0) and small.root == large.root
    assert small.blocks[2:] == large.blocks[2:] and small.blocks[0] != large.blocks[0]
    assert list(pb.Submit.FromString(prompt.of(card(8)).wire).block_hashes) == list(large.blocks)


async def test_further_forms_of_long_prompts_are_computed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    async def to_thread(compute: Any, *arguments: Any) -> Any:
        names.append(compute.__name__)
        return compute(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    cards = [card(), card(takes_spaces=False), card(takes_spaces=False)]
    await forms(INLINE_TOKENS).prepare(cards)
    assert names == []
    long = forms(INLINE_TOKENS + 1)
    await long.prepare(cards)
    await long.prepare(cards)
    assert names == ["_hashes_of"] and long.of(cards[1]).hashes is not None


def test_what_a_text_process_has_prepared_is_sent_as_it_is() -> None:
    asked = request(40)
    wire = wire_prompt(TokenIds(range(40)), identity=IDENTITY, grain=GRAIN, salt=b"salt", num_public_tokens=0)
    hashes = hash_prompt(IDENTITY, asked.token_ids, b"salt", grain=GRAIN)
    assert PromptForms(replace(asked, wire=wire), hashes).of(card()).wire == wire.token_ids + wire.block_hashes


def test_a_space_folds_the_same_hashes_into_keys_of_its_own() -> None:
    hashes = forms(40).of(card(8)).hashes
    assert hashes is not None
    ours, theirs = (worker_keys(hashes.blocks.packed, GRAIN, 8, space) for space in (SPACE, b"t" * 16))
    assert len(ours) == len(theirs) == 5 * 16
    assert not {ours[i : i + 16] for i in range(0, 80, 16)} & {theirs[i : i + 16] for i in range(0, 80, 16)}
