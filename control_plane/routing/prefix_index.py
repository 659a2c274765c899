"""What the prefix index answers: how many leading blocks of a prompt each pool and each host's store has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class CachedPrefix(NamedTuple):
    """The leading tokens (or blocks) of a prompt that one worker finds cached; each part follows the one before."""

    own: int = 0
    """In the worker's own pool."""
    host: int = 0
    """In its host's store."""
    remote: int = 0
    """In the store of `remote_host` only."""
    remote_host: str = ""


@dataclass(frozen=True)
class PrefixMatch:
    """How many leading blocks of one prompt each pool and each host's store has."""

    pools: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def deepest_host(self) -> tuple[str, int]:
        """The host whose store has the most blocks, and how many; "" and 0 if no store has any."""
        return max(self.hosts.items(), key=lambda item: item[1], default=("", 0))

    def seen_from(self, incarnation: str, host_id: str) -> CachedPrefix:
        """Return the blocks that a worker finds in its own pool, on its host and on another host."""
        num_own = self.pools.get(incarnation, 0)
        if not self.hosts:
            return CachedPrefix(num_own)
        num_here = max(num_own, self.hosts.get(host_id, 0))
        remote_host, num_there = self.deepest_host
        if num_there <= num_here:
            return CachedPrefix(num_own, num_here - num_own)
        return CachedPrefix(num_own, num_here - num_own, num_there - num_here, remote_host)
