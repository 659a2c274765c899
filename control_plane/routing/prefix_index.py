"""Maps keys of blocks to the workers' pools and hosts' stores that had the blocks last.

A block of the index has as many tokens as the fleet's grain. Its key is its hash, folded with the space of the workers
that can read it: a worker's blocks are never found for a worker of another space.

The index learns from requests; workers do not report their blocks. A block that was computed or pulled is in that
worker's pool, and a computed block was offered to the store of the worker's host. A pool dies with its worker's
incarnation; a store outlives its workers. Evictions are not reported here, so the index may be wrong. A wrong entry
costs time; it never changes an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.block_chain import BlockHashes, packed_hashes
from tandem_runtime.kv.spaces import fold

DEFAULT_MAX_BLOCKS = 1_000_000
"""About 175 bytes each (measured: 172 MB for a million), independent of the size of a block's KV."""
_EXACT_BLOCKS = 1024
_SAMPLED_BLOCKS = 16
"""Of a chain beyond its first 1,024 blocks, every 16th is held. A hash covers all blocks before it, so a found one
proves the 15 before; a prefix that ends between two counts as up to 15 blocks shorter."""
_MAX_PLACES = 4
_MAX_COMBINATIONS = 4096


class _Places(NamedTuple):
    """The places that had a block last, latest first. Blocks in the same places share one object."""

    pools: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


_NOWHERE = _Places()


@dataclass(frozen=True)
class CachedPrefix:
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

    def seen_from(self, incarnation: str, host_id: str) -> CachedPrefix:
        """Return the blocks that a worker finds in its own pool, on its host and on another host."""
        num_own = self.pools.get(incarnation, 0)
        num_here = max(num_own, self.hosts.get(host_id, 0))
        remote_host, num_there = max(self.hosts.items(), key=lambda item: item[1], default=("", 0))
        num_remote = max(0, num_there - num_here)
        return CachedPrefix(num_own, num_here - num_own, num_remote, remote_host if num_remote else "")


class PrefixIndex:
    """A bounded index from the key of a block to places.

    Least recently used blocks are dropped first, and of one prompt its last blocks: a block is useless without the
    blocks before it.
    """

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, _Places] = OrderedDict()
        self._combinations: dict[_Places, _Places] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def learn(
        self, block_hashes: Sequence[bytes], incarnation: str, host_id: str, first: int = 0, space: bytes = b""
    ) -> None:
        """Record that a worker has these blocks of a chain, whose first one is block `first` of the chain.

        `host_id`: the host whose store has them too, or "".
        """
        keys = _keys(block_hashes, space)
        known = learnt = None
        for position in reversed([*_points(first, first + len(block_hashes))]):
            block_hash = keys[position - first]
            places = self._blocks.get(block_hash, _NOWHERE)
            if places is not known:
                known = places
                learnt = self._shared(_Places(_first(incarnation, places.pools), _first(host_id, places.hosts)))
            assert learnt is not None, "places are never None"
            self._blocks[block_hash] = learnt
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def forget(self, block_hashes: Sequence[bytes], host_id: str, first: int = 0, space: bytes = b"") -> None:
        """Record that a host's store did not have these blocks, whose first one is block `first` of their chain."""
        keys = _keys(block_hashes, space)
        for position in _points(first, first + len(block_hashes)):
            block_hash = keys[position - first]
            if (places := self._blocks.get(block_hash)) and host_id in places.hosts:
                hosts = tuple(host for host in places.hosts if host != host_id)
                self._blocks[block_hash] = self._shared(places._replace(hosts=hosts))

    def find(self, block_hashes: Sequence[bytes], space: bytes = b"") -> PrefixMatch:
        """Return how many leading blocks each place has; one pass over the blocks."""
        runs, keys = _Runs(), _keys(block_hashes, space)
        for position in _points(0, len(block_hashes)):
            places = self._blocks.get(keys[position])
            if places is None or not runs.extend(places, position + 1):
                break
        return runs.match()

    def _shared(self, places: _Places) -> _Places:
        if len(self._combinations) > _MAX_COMBINATIONS:
            self._combinations.clear()  # sharing only saves memory
        return self._combinations.setdefault(places, places)


def _keys(block_hashes: Sequence[bytes], space: bytes) -> Sequence[bytes]:
    return BlockHashes(fold(packed_hashes(block_hashes), space)) if space else block_hashes


def _first(name: str, others: tuple[str, ...]) -> tuple[str, ...]:
    if not name or others[:1] == (name,):
        return others
    return (name, *(other for other in others if other != name))[:_MAX_PLACES]


def _points(first: int, end: int) -> Iterator[int]:
    """Yield the positions of a chain that the index holds, from `first` up to `end`."""
    yield from range(first, min(end, _EXACT_BLOCKS))
    start = max(first, _EXACT_BLOCKS)
    yield from range(start + (-start - 1) % _SAMPLED_BLOCKS, end, _SAMPLED_BLOCKS)


class _Runs:
    """How far each place has the chain without a gap."""

    def __init__(self) -> None:
        self._pools: dict[str, int] = {}
        self._hosts: dict[str, int] = {}
        self._num_blocks = 0
        self._places: _Places | None = None
        self._open: tuple[list[str], list[str]] = [], []
        """The pools and hosts whose runs have reached the latest block."""

    def extend(self, places: _Places, num_blocks: int) -> bool:
        """Add the block at the end of the first `num_blocks`; return False if no run has reached it."""
        if places is not self._places:  # neighbours mostly share one object
            self._settle()
            reached = self._num_blocks
            self._open = (
                [name for name in places.pools if self._pools.get(name, 0) == reached],
                [name for name in places.hosts if self._hosts.get(name, 0) == reached],
            )
            self._places = places
        self._num_blocks = num_blocks
        return any(self._open)

    def match(self) -> PrefixMatch:
        self._settle()
        return PrefixMatch(self._pools, self._hosts)

    def _settle(self) -> None:
        for runs, names in zip((self._pools, self._hosts), self._open, strict=True):
            runs.update(dict.fromkeys(names, self._num_blocks))
