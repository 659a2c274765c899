"""Orders blocks for eviction, over all accounts and within each account that has a quota.

An account that would exceed its quota evicts its own blocks. When memory is short, the least recently used block of any
account is evicted. An account with a quota therefore has an order of its own beside the global order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer_svc.blocks.block import Block, BlockKey
from kv_transfer_svc.blocks.leaf_heap import IsBusy, LeafHeap


@dataclass(frozen=True)
class Quotas:
    """Bytes of blocks per account tag; None means no quota."""

    default_bytes: int | None = None
    by_tag: Mapping[bytes, int] | None = None

    def of(self, account_tag: bytes) -> int | None:
        return (self.by_tag or {}).get(account_tag, self.default_bytes)


@dataclass(slots=True)
class _Account:
    heap: LeafHeap | None
    """None for an account without a quota."""
    num_bytes: int = 0


class EvictionOrder:
    """All blocks that are not yet being demoted, in eviction order: global, and per account with a quota."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._heap = LeafHeap()
        self._accounts: dict[bytes, _Account] = {}

    def add(self, block: Block, parent: BlockKey | None) -> None:
        account = self._account(block.account_tag)
        account.num_bytes += block.extent.held_bytes
        for heap in self._heaps(account):
            heap.add(block.key, parent)

    def remove(self, block: Block) -> None:
        account = self._accounts[block.account_tag]
        for heap in self._heaps(account):
            heap.remove(block.key)
        account.num_bytes -= block.extent.held_bytes
        if not account.num_bytes:
            del self._accounts[block.account_tag]

    def use(self, blocks: Sequence[Block]) -> None:
        """Count one use of these blocks together."""
        self._heap.use([block.key for block in blocks])
        for tag in dict.fromkeys(block.account_tag for block in blocks):
            own = self._accounts[tag].heap
            if own is not None:
                own.use([block.key for block in blocks if block.account_tag == tag])

    def excess_bytes(self, account_tag: bytes, num_bytes: int) -> int:
        """Return by how many bytes `num_bytes` more would exceed the account's quota; 0 if they fit."""
        quota, account = self._quotas.of(account_tag), self._accounts.get(account_tag)
        held = account.num_bytes if account is not None else 0
        return 0 if quota is None else max(0, held + num_bytes - quota)

    def is_too_large(self, account_tag: bytes, num_bytes: int) -> bool:
        """Whether `num_bytes` alone exceed the account's quota."""
        quota = self._quotas.of(account_tag)
        return quota is not None and num_bytes > quota

    def victim(self, is_busy: IsBusy) -> BlockKey | None:
        return self._heap.victim(is_busy)

    def own_victim(self, account_tag: bytes, is_busy: IsBusy) -> BlockKey | None:
        """Return the next block to evict of one account with a quota."""
        account = self._accounts.get(account_tag)
        return account.heap.victim(is_busy) if account is not None and account.heap is not None else None

    def check(self, blocks: Iterable[Block]) -> None:
        """Assert that the accounts hold exactly the bytes of `blocks`, and that no account exceeds its quota."""
        held: dict[bytes, int] = {}
        for block in blocks:
            held[block.account_tag] = held.get(block.account_tag, 0) + block.extent.held_bytes
        assert held == {tag: account.num_bytes for tag, account in self._accounts.items()}, "accounts are miscounted"
        assert not any(self.excess_bytes(tag, 0) for tag in held), "an account is over its quota"

    def _account(self, tag: bytes) -> _Account:
        if tag not in self._accounts:
            self._accounts[tag] = _Account(None if self._quotas.of(tag) is None else LeafHeap())
        return self._accounts[tag]

    def _heaps(self, account: _Account) -> list[LeafHeap]:
        return [self._heap] if account.heap is None else [self._heap, account.heap]
