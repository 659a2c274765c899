"""Whose block goes first: anybody's, or the account's own?

An account that would pass its quota makes room among its own blocks; for lack of memory anybody's least wanted block
goes. Accounts with a quota therefore have an order of their own, beside the one of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer_svc.blocks.block import Block
from kv_transfer_svc.blocks.keys import BlockKey
from kv_transfer_svc.blocks.policy import EvictionPolicy, IsBusy

NewPolicy = Callable[[], EvictionPolicy]


@dataclass(frozen=True)
class Quotas:
    """Bytes of blocks per account tag; None is no quota."""

    default_bytes: int | None = None
    by_tag: Mapping[bytes, int] | None = None

    def of(self, account_tag: bytes) -> int | None:
        return (self.by_tag or {}).get(account_tag, self.default_bytes)


@dataclass(slots=True)
class _Account:
    policy: EvictionPolicy | None
    num_bytes: int = 0


class VictimOrder:
    """All blocks that have not begun to go, in the order in which they should: overall, and within accounts."""

    def __init__(self, new_policy: NewPolicy, quotas: Quotas) -> None:
        self._new_policy = new_policy
        self._quotas = quotas
        self._policy = new_policy()
        self._accounts: dict[bytes, _Account] = {}

    def add(self, block: Block, cost: float, parent: BlockKey | None) -> None:
        account = self._account(block.account_tag)
        account.num_bytes += block.extent.held_bytes
        for policy in self._policies(account):
            policy.added(block.key, block.extent.num_bytes, cost, parent)

    def remove(self, block: Block) -> None:
        account = self._accounts[block.account_tag]
        for policy in self._policies(account):
            policy.removed(block.key)
        account.num_bytes -= block.extent.held_bytes
        if not account.num_bytes:
            del self._accounts[block.account_tag]

    def use(self, blocks: Sequence[Block]) -> None:
        """Count one use of these blocks together."""
        self._policy.used([block.key for block in blocks])
        for tag in dict.fromkeys(block.account_tag for block in blocks):
            own = self._accounts[tag].policy
            if own is not None:
                own.used([block.key for block in blocks if block.account_tag == tag])

    def excess_bytes(self, account_tag: bytes, num_bytes: int) -> int:
        """Return by how much the account would be over its quota with `num_bytes` more; 0 if it would not."""
        quota, account = self._quotas.of(account_tag), self._accounts.get(account_tag)
        held = account.num_bytes if account is not None else 0
        return 0 if quota is None else max(0, held + num_bytes - quota)

    def is_too_large(self, account_tag: bytes, num_bytes: int) -> bool:
        """Whether the account could not have these bytes even if it had no others."""
        quota = self._quotas.of(account_tag)
        return quota is not None and num_bytes > quota

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        return self._policy.victim(is_busy)

    def own_victim(self, account_tag: bytes, is_busy: IsBusy) -> BlockKey | None:
        """Return the least wanted block of one account with a quota."""
        account = self._accounts.get(account_tag)
        return account.policy.victim(is_busy) if account is not None and account.policy is not None else None

    def check(self, blocks: Iterable[Block]) -> None:
        """Assert that accounts hold just these blocks' bytes, and no more than they may."""
        held: dict[bytes, int] = {}
        for block in blocks:
            held[block.account_tag] = held.get(block.account_tag, 0) + block.extent.held_bytes
        assert held == {tag: account.num_bytes for tag, account in self._accounts.items()}, "accounts are miscounted"
        assert not any(self.excess_bytes(tag, 0) for tag in held), "an account is over its quota"

    def _account(self, tag: bytes) -> _Account:
        if tag not in self._accounts:
            self._accounts[tag] = _Account(None if self._quotas.of(tag) is None else self._new_policy())
        return self._accounts[tag]

    def _policies(self, account: _Account) -> list[EvictionPolicy]:
        return [self._policy] if account.policy is None else [self._policy, account.policy]
