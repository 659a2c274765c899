"""Two accounts never share a block that is not public, of prompt or answer, whatever they send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.block_chain import BlockHashes
from control_plane.dispatch.block_hashes import (
    PromptHasher,
    PromptHashes,
    account_tag,
    cache_salt,
    hash_prompt,
    wire_prompt,
)
from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.submitter import decode_submit
from control_plane.fleet.registry import Worker
from control_plane.generation import NOTHING, AccountPolicies, CachePolicy, TokenIds, TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.kv.spaces import model_identity
from tandem_worker.convert import add_request
from tests.control_plane.dispatch.test_request_stream import Events
from tests.tandem_engine.scheduling.harness import EngineHarness

SECRET = b"s" * 32
GRAIN = 4
CARD = pb.ModelCard(
    model_id="m", fingerprint=pb.Fingerprint(digest=b"f" * 16, weights_digest="w"), block_size=GRAIN, takes_spaces=True
)
IDENTITY = model_identity(CARD.fingerprint)
WORKER = Worker(pb.WorkerInfo(card=CARD), pb.LoadReport(), 0.0)
PUBLIC = [7, 7, 8, 8, 7, 8, 7, 8, 7, 7, 7, 7, 8, 8]  # three full blocks of four, and two tokens more
TOKENS = st.lists(st.sampled_from([7, 8]), max_size=24)
PROMPTS = st.builds(lambda length, rest: PUBLIC[:length] + rest, st.integers(0, len(PUBLIC)), TOKENS)


@dataclass(frozen=True)
class PromptAndAnswer:
    """A request, and an answer that follows its prompt."""

    account: str
    salt: bytes
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def num_public_tokens(self) -> int:
        """Count the leading tokens of the public text."""
        pairs = list(zip(self.prompt, PUBLIC, strict=False))
        return next((i for i, (mine, public) in enumerate(pairs) if mine != public), len(pairs))

    def blocks(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of public blocks, and of all other blocks, the answer's included."""
        salt = cache_salt(SECRET, self.account) + self.salt
        hashes = hash_prompt(IDENTITY, self.prompt, salt, b"", 0 if self.salt else self.num_public_tokens, GRAIN)
        whole = list(hashes.with_answer(self.prompt, self.answer))
        assert len(whole) == (len(self.prompt) + len(self.answer)) // 4
        return whole[: hashes.num_public_blocks], whole[hashes.num_public_blocks :]


ASKED = st.builds(
    PromptAndAnswer,
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([b"", b"x"]),
    PROMPTS.map(tuple),
    TOKENS.map(tuple),
)


@given(ASKED, ASKED)
@settings(max_examples=400)
def test_whoever_differs_in_account_or_salt_shares_only_public_blocks(
    one: PromptAndAnswer, other: PromptAndAnswer
) -> None:
    (public, private), (others_public, others_private) = one.blocks(), other.blocks()
    assert not {*public, *others_public} & {*private, *others_private}
    if (one.account, one.salt) != (other.account, other.salt):
        assert not set(private) & set(others_private)


@given(ASKED, ASKED)
@settings(max_examples=400)
def test_equal_hashes_are_equal_tokens_up_to_the_blocks_end(one: PromptAndAnswer, other: PromptAndAnswer) -> None:
    ends: dict[bytes, tuple[int, ...]] = {}
    for asked in (one, other):
        tokens = (*asked.prompt, *asked.answer)
        for index, block_hash in enumerate([*asked.blocks()[0], *asked.blocks()[1]], start=1):
            assert ends.setdefault(block_hash, tokens[: 4 * index]) == tokens[: 4 * index]


@given(ASKED)
def test_what_follows_public_blocks_is_hashed_as_if_nothing_were_public(asked: PromptAndAnswer) -> None:
    salt = cache_salt(SECRET, asked.account) + asked.salt
    hashes = hash_prompt(IDENTITY, asked.prompt, salt, b"", asked.num_public_tokens, GRAIN)
    alone = hash_prompt(IDENTITY, asked.prompt, salt, grain=GRAIN)
    assert hashes.blocks[hashes.num_public_blocks :] == alone.blocks[hashes.num_public_blocks :]
    assert hashes.root == alone.root


def test_public_blocks_are_those_within_the_text_and_never_the_last() -> None:
    def num_public(num_tokens: int, num_public_tokens: int) -> int:
        return hash_prompt(IDENTITY, [7] * num_tokens, b"salt", b"", num_public_tokens, GRAIN).num_public_blocks

    assert [num_public(40, tokens) for tokens in (0, 3, 4, 11, 12, 14)] == [0, 0, 1, 2, 3, 3]
    assert [num_public(tokens, tokens) for tokens in (3, 4, 7, 8, 12)] == [0, 0, 0, 1, 2]


def test_hashes_that_end_in_a_public_block_cannot_be_made() -> None:
    blocks = BlockHashes(b"".join(hash_blocks(hash_root(b"f", 4), PUBLIC, 4)))
    with pytest.raises(AssertionError, match="all accounts would share"):
        PromptHashes(b"root", blocks, num_public_blocks=3)


def test_the_history_of_a_request_has_samples_of_its_hashes() -> None:
    request = asked("me", range(1100))
    hashes = hash_prompt(IDENTITY, request.token_ids, b"salt", grain=GRAIN)
    sampled = RequestState(request, CARD, hashes, Events()).history.prompt_blocks
    assert sampled is not None and sampled.num_tokens == 512
    assert sampled.hashes == [hashes.blocks[127][:8], hashes.blocks[255][:8]]
    uncached = asked("me")
    assert RequestState(uncached, CARD, None, Events()).history.prompt_blocks is None


# ------------------------------------------------------------------------------------------------ in one engine


def asked(account: str, prompt: Sequence[int] = PUBLIC[:12], **changes: Any) -> TokenRequest:
    """Return a request whose default prompt has public blocks only."""
    fields: dict[str, Any] = {"num_public_tokens": 12, **changes}
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    return TokenRequest(account, account, "m", tuple(prompt), sampling, (0,), deadline=time.monotonic() + 60, **fields)


def submit_of(request: TokenRequest, hashes: PromptHashes | None) -> pb.Submit:
    """Return what a worker reads, without the times: they differ between two calls."""
    state = RequestState(request, CARD, hashes, Events())
    submit = pb.Submit.FromString(
        state.forms.of(CARD).wire + decode_submit(state, state.choices[0], WORKER).SerializeToString()
    )
    submit.ClearField("deadline_unix_ms")
    submit.ClearField("time_left_ms")
    return submit


async def blocks_filled(harness: EngineHarness, request: TokenRequest) -> tuple[list[str], int]:
    """Run a request in an engine; return the hashes of the filled blocks and the number of cached tokens."""
    hashes = await PromptHasher(SECRET, AccountPolicies(), GRAIN).hashes(request, CARD)
    submit = submit_of(request, hashes)
    harness.core.handle(add_request(submit, request.request_id, "aggregated"))
    filled: list[str] = []
    num_cached = 0
    while harness.core.has_work():
        done = harness.step()
        filled += [block_hash for each in done.filled for block_hash in each.hashes]
        num_cached = max([num_cached, *(output.num_cached_tokens for output in done.outputs)])
    return filled, num_cached


async def test_answers_to_one_public_prompt_are_no_two_accounts_in_common() -> None:
    harness = EngineHarness(num_blocks=32)
    mine, _ = await blocks_filled(harness, asked("a"))
    theirs, num_cached = await blocks_filled(harness, asked("b"))
    # The prompt's last block would be public, but the answer continues its chain.
    assert (len(mine), len(theirs), num_cached) == (5, 3, 8)
    assert not set(mine) & set(theirs)
    again, num_cached = await blocks_filled(harness, asked("b"))
    assert (again, num_cached) == (theirs, 8)  # the last token is always computed, and with it the last full block
    harness.assert_nothing_is_left()


async def test_two_accounts_share_exactly_the_public_blocks() -> None:
    harness = EngineHarness(num_blocks=32)
    prompt = [*PUBLIC, 1, 2, 3, 4, 5, 6, 7, 8]
    _, none = await blocks_filled(harness, asked("a", prompt))
    _, shared = await blocks_filled(harness, asked("b", prompt))
    _, salted = await blocks_filled(harness, asked("c", prompt, salt=b"mine"))
    assert (none, shared, salted) == (0, 12, 0)


async def test_two_accounts_with_the_same_prompt_share_nothing() -> None:
    harness = EngineHarness(num_blocks=32)
    for account in ("a", "b", "c"):
        assert (await blocks_filled(harness, asked(account, num_public_tokens=0)))[1] == 0


# ------------------------------------------------------------------------------------------ request and account


async def test_the_account_bounds_what_its_requests_ask_for() -> None:
    hasher = PromptHasher(SECRET, AccountPolicies.parse(["off=off", "reader=read:8", "*=on"]), GRAIN)

    async def bounds(account: str, cache: CachePolicy) -> tuple[int | None, int | None] | None:
        hashes = await hasher.hashes(asked(account, cache=cache), CARD)
        return None if hashes is None else (hashes.max_found_blocks, hashes.max_left_blocks)

    assert await bounds("off", CachePolicy.of("on")) is None
    assert await bounds("reader", CachePolicy.of("on")) == (2, 0)
    assert await bounds("reader", CachePolicy.of("write")) is None
    assert await bounds("reader", CachePolicy.of("on", 4)) == (1, 0)
    assert await bounds("other", CachePolicy.of("on")) == (None, None)
    assert await bounds("other", CachePolicy.of("write", 4)) == (0, 1)
    assert await bounds("other", CachePolicy.of("on", 3)) is None  # less than one block
    assert await bounds("other", NOTHING) is None


async def test_workers_are_told_bounds_and_public_blocks_and_nothing_where_there_are_none() -> None:
    hasher = PromptHasher(SECRET, AccountPolicies(), GRAIN)
    bounded = asked("a", cache=CachePolicy.of("read", 8))
    submit = submit_of(bounded, await hasher.hashes(bounded, CARD))
    assert (submit.max_found_blocks, submit.max_left_blocks, submit.num_public_blocks) == (2, 0, 2)
    assert submit.account_tag == account_tag(SECRET, "a")
    command = add_request(submit, "r", "aggregated")
    assert (command.max_found_blocks, command.max_left_blocks) == (2, 0)
    free = asked("a", num_public_tokens=0)
    submit = submit_of(free, await hasher.hashes(free, CARD))
    assert not submit.HasField("max_found_blocks") and not submit.HasField("max_left_blocks")
    command = add_request(submit, "r", "aggregated")
    assert (command.max_found_blocks, command.max_left_blocks, submit.num_public_blocks) == (None, None, 0)


# ------------------------------------------------------------------------------------------- what text processes send


def prepared(request: TokenRequest, card: pb.ModelCard = CARD) -> TokenRequest:
    """Return a request as a text process prepares it."""
    wire = wire_prompt(
        TokenIds(request.token_ids),
        identity=model_identity(card.fingerprint),
        grain=GRAIN,
        salt=cache_salt(SECRET, request.account) + request.salt,
        num_public_tokens=0 if request.salt else request.num_public_tokens,
    )
    return replace(request, wire=wire)


@given(ASKED)
async def test_a_prepared_prompt_has_the_hashes_and_the_submit_of_one_that_is_hashed_here(
    sent: PromptAndAnswer,
) -> None:
    request = asked(sent.account, list(sent.prompt), salt=sent.salt, num_public_tokens=sent.num_public_tokens)
    hasher = PromptHasher(SECRET, AccountPolicies(), GRAIN)
    here, there = await hasher.hashes(request, CARD), await hasher.hashes(prepared(request), CARD)
    assert here is not None and there is not None and there.wire == prepared(request).wire.block_hashes  # type: ignore[union-attr]
    assert there == here
    assert submit_of(prepared(request), there) == submit_of(request, here)


async def test_hashes_of_another_model_or_account_are_computed_again() -> None:
    hasher, request = PromptHasher(SECRET, AccountPolicies(), GRAIN), prepared(asked("a"))
    changed = pb.ModelCard(model_id="m", fingerprint=pb.Fingerprint(weights_digest="other"), block_size=4)
    for stale, card in ((request, changed), (replace(request, account="b"), CARD)):
        assert await hasher.hashes(stale, card) == await hasher.hashes(replace(stale, wire=None), card)


def test_packed_ids_and_hashes_are_the_sequences_that_they_hold() -> None:
    ids, hashes = TokenIds([1, 2**32 - 1, 3]), BlockHashes(b"a" * 16 + b"b" * 16)
    assert ids == (1, 2**32 - 1, 3) == TokenIds.unpack(ids.packed()) and ids != (1, 2, 3) and ids != (1,)
    assert list(ids[1:]) == [2**32 - 1, 3] and ids[-1] == 3 and isinstance(ids[:1], TokenIds)
    assert hashes == (b"a" * 16, b"b" * 16) and hashes[1:] == [b"b" * 16] and hashes[-1] == b"b" * 16
    assert not BlockHashes() and list(hashes) == [b"a" * 16, b"b" * 16]
    with pytest.raises(IndexError):
        hashes[2]
