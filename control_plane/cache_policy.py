"""Limits which cached blocks a request may find, and which blocks it may leave for later requests.

The request sets a policy, and the operator sets one for the account. The stricter of both applies, to finding and to
leaving separately; of two bounds the smaller one applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

CacheMode = Literal["on", "read", "write", "off"]
CACHE_MODES: tuple[CacheMode, ...] = get_args(CacheMode)


@dataclass(frozen=True)
class CachePolicy:
    """Without a bound, the answer's blocks are left too. A bound counts tokens of the prompt, in whole blocks."""

    finds: bool = True
    leaves: bool = True
    max_tokens: int | None = None
    """Leading tokens of the prompt that may be found or left; None: all."""

    @classmethod
    def of(cls, mode: CacheMode, max_tokens: int | None = None) -> CachePolicy:
        """on: finds and leaves; read: leaves nothing; write: finds nothing; off: neither."""
        return cls(mode in ("on", "read"), mode in ("on", "write"), max_tokens)

    def within(self, other: CachePolicy) -> CachePolicy:
        """Return the policy that both allow."""
        bounds = [bound for bound in (self.max_tokens, other.max_tokens) if bound is not None]
        return CachePolicy(self.finds and other.finds, self.leaves and other.leaves, min(bounds, default=None))

    def max_found_blocks(self, num_prompt_tokens: int, block_size: int) -> int | None:
        """Return how many leading blocks may come from a cache; None: all."""
        return self._max_blocks(self.finds, num_prompt_tokens, block_size)

    def max_left_blocks(self, num_prompt_tokens: int, block_size: int) -> int | None:
        """Return how many leading blocks later requests may find; None: all blocks of prompt and answer."""
        return self._max_blocks(self.leaves, num_prompt_tokens, block_size)

    def _max_blocks(self, is_allowed: bool, num_prompt_tokens: int, block_size: int) -> int | None:
        if not is_allowed:
            return 0
        return None if self.max_tokens is None else min(self.max_tokens, num_prompt_tokens) // block_size


EVERYTHING = CachePolicy()
NOTHING = CachePolicy.of("off")


@dataclass(frozen=True)
class AccountPolicies:
    """The policy of each account, from the operator's setting."""

    by_account: Mapping[str, CachePolicy] = field(default_factory=dict)
    others: CachePolicy = EVERYTHING

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AccountPolicies:
        """Parse `ACCOUNT=MODE` and `ACCOUNT=MODE:TOKENS`, `*` for all others; raises ValueError."""
        policies: dict[str, CachePolicy] = {}
        for entry in entries:
            account, policy = _parse(entry)
            if account in policies:
                raise ValueError(f"prompt_cache_accounts names {account!r} twice; keep one entry")
            policies[account] = policy
        return cls(policies, policies.pop("*", EVERYTHING))

    def of(self, account: str) -> CachePolicy:
        return self.by_account.get(account, self.others)


def _parse(entry: str) -> tuple[str, CachePolicy]:
    account, equals, rule = entry.rpartition("=")
    word, colon, bound = rule.partition(":")
    mode = next((mode for mode in CACHE_MODES if mode == word), None)
    has_bound = bound.isascii() and bound.isdecimal()
    if not account or not equals or mode is None or has_bound != bool(colon):
        raise ValueError(
            f"prompt_cache_accounts has {entry!r}, which is no rule; write ACCOUNT=MODE or ACCOUNT=MODE:TOKENS, the "
            f"mode one of {', '.join(CACHE_MODES)}, and * for all other accounts"
        )
    return account, CachePolicy.of(mode, int(bound) if has_bound else None)
