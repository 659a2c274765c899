"""A request never gets more of the caches than its account may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.generation import CACHE_MODES, EVERYTHING, NOTHING, AccountPolicies, CachePolicy

BLOCK = 16
POLICIES = st.builds(CachePolicy.of, st.sampled_from(CACHE_MODES), st.none() | st.integers(0, 200))


def blocks(policy: CachePolicy, num_prompt_tokens: int = 100) -> tuple[int | None, int | None]:
    found, left = policy.max_found_blocks, policy.max_left_blocks
    return found(num_prompt_tokens, BLOCK), left(num_prompt_tokens, BLOCK)


def test_the_words_mean_what_they_say() -> None:
    assert [blocks(CachePolicy.of(mode)) for mode in CACHE_MODES] == [(None, None), (None, 0), (0, None), (0, 0)]
    assert CachePolicy.of("on") == EVERYTHING and CachePolicy.of("off") == NOTHING


def test_a_bound_counts_whole_blocks_of_the_prompt_and_never_the_answer() -> None:
    assert blocks(CachePolicy.of("on", 47)) == (2, 2)
    assert blocks(CachePolicy.of("on", 48)) == (3, 3)
    assert blocks(CachePolicy.of("on", 100_000)) == (6, 6)  # the seventh block has tokens of the answer
    assert blocks(CachePolicy.of("read", 48)) == (3, 0)
    assert blocks(CachePolicy.of("write", 15)) == (0, 0)


@given(POLICIES, POLICIES, st.integers(1, 300))
def test_the_stricter_of_both_holds(one: CachePolicy, other: CachePolicy, num_prompt_tokens: int) -> None:
    both = blocks(one.within(other), num_prompt_tokens)
    assert one.within(other) == other.within(one)
    for here, mine, theirs in zip(both, blocks(one, num_prompt_tokens), blocks(other, num_prompt_tokens), strict=True):
        assert here == min((bound for bound in (mine, theirs) if bound is not None), default=None)


def test_accounts_are_read_from_the_setting() -> None:
    policies = AccountPolicies.parse(["team-a=off", "team-b=read:512", "a=b=write", "*=on:32"])
    assert policies.of("team-a") == NOTHING
    assert policies.of("team-b") == CachePolicy(finds=True, leaves=False, max_tokens=512)
    assert policies.of("a=b") == CachePolicy.of("write")
    assert policies.of("anyone") == policies.of("*") == CachePolicy.of("on", 32)
    assert AccountPolicies.parse([]).of("anyone") == EVERYTHING


@pytest.mark.parametrize("entry", ["team-a", "team-a=of", "=off", "team-a=on:", "team-a=on:-1", "a=on:x", "a=on:²", ""])
def test_a_rule_that_is_none_is_named_with_what_would_be_one(entry: str) -> None:
    with pytest.raises(ValueError, match="on, read, write, off") as refused:
        AccountPolicies.parse(["team-b=on", entry])
    assert repr(entry) in str(refused.value)


def test_an_account_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        AccountPolicies.parse(["a=on", "a=off"])
