"""Predicts what is left of a hand-over when prefill samples the first token: by bytes, by the pair of hosts, by arena.

A prefill worker shows its blocks after each step; decode's host reads them while the rest is computed. With B bytes to
move, of which the last step shows b, m milliseconds per byte, and t milliseconds between the end of the first step and
that of the last one:

    transfer = max(b * m, B * m - t)
    wait     = what the read lacks of the free arena * m          (between hosts)
    asking   = what is left of a round trip when prefill ends     (between hosts)
    cost     = fixed(pair) + transfer + wait + asking

Decode's host asks prefill's one for the blocks while prefill computes, which hides the round trip if that takes longer.

`fixed` and `m` are learnt for each pair of hosts (`pair_line.py`). Without news they return to what is assumed, so that
a pair that was slow once is tried again. Between hosts the bytes come in windows of the arena, and `m` is assumed by
what the link has measured.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_figures import ASSUMED_LINK, Arena, Link, WorkerFigures
from control_plane.routing.pair_line import PairLine
from tandem.v1 import types_pb2 as pb

_ASSUMED_FIXED_MS = 8.0
"""Of a hand-over within a host."""
_MEMORY_MS_PER_BYTE = 1000.0 / 5e9
"""Within a host: one copy, beside other work."""
MAX_HAND_OVER_MS = 10_000.0
"""A longer one counts as this one: a worker's clock was set, or its host stood still."""
MAX_PAIRS = 16_384
"""Learnt ones: those of 128 hosts."""
HALF_LIFE_SECONDS = 60.0
REFRESH_SECONDS = 1.0
"""How long a pair is as it was, while it returns to what is assumed."""
_SAME = 0.05
"""A link whose speed changes by less is the same: predictions are no better."""
_DEFAULT_CHUNK_TOKENS = 512
_NO_ARENA = Arena(math.inf, 4 << 20)
_NO_LINKS: Mapping[str, Link] = {}
_NO_PAIRS: Mapping[str, Pair] = {}
_NOBODY: frozenset[str] = frozenset()


class Shown(msgspec.Struct, frozen=True, gc=False):
    """What a prefill worker shows of a prompt, and when."""

    num_tokens: int
    """Of the prompt."""
    num_last_tokens: int
    """Computed in its last step."""
    overlap_ms: float
    """From the end of the first step, when the blocks before it are shown too, until that of the last one."""
    first_ms: float = math.inf
    """From when both workers are asked until the end of the last step."""


class Pair(msgspec.Struct, frozen=True, gc=False):
    """What moving blocks from one host to another takes."""

    fixed_ms: float
    ms_per_byte: float
    latency_ms: float
    """Of a round trip."""
    until: float | None = None
    """When it is found anew, monotonic seconds; None: once something has changed."""


class Known(NamedTuple):
    """What a pair is made of."""

    assumed_ms: float
    assumed_ms_per_byte: float
    learnt_ms: float
    learnt_ms_per_byte: float
    learnt_at: float
    """Monotonic seconds; -inf: nothing is learnt, and `learnt_ms` and `learnt_ms_per_byte` are what is assumed."""
    latency_ms: float


class _Learnt(NamedTuple):
    """Of a pair, from hand-overs that have ended."""

    line: PairLine
    fixed_ms: float
    ms_per_byte: float
    at: float


_WITHIN_A_HOST = Known(_ASSUMED_FIXED_MS, _MEMORY_MS_PER_BYTE, _ASSUMED_FIXED_MS, _MEMORY_MS_PER_BYTE, -math.inf, 0.0)


class HandOverCost(NamedTuple):
    """What is left of one hand-over when prefill samples the first token."""

    from_host: str
    to_host: str
    num_bytes: int
    """All that the decode worker does not have."""
    fixed_ms: float
    """With what is left of the round trip."""
    transfer_ms: float
    wait_ms: float
    """Until the arena of the decode worker's host has room."""
    ms_per_byte: float

    @property
    def ms(self) -> float:
        return self.fixed_ms + self.transfer_ms + self.wait_ms


class Reader(msgspec.Struct, frozen=True, gc=False):
    """Of one prompt: the decode worker that would read it, as it is now."""

    host_id: str
    bytes_per_token: float
    num_bytes: float
    """That it does not have of the prompt."""
    num_lacking: float
    """Bytes that its host's arena has to be given back before it can take two windows of these, or all."""

    def cost(self, shown: Shown, from_host: str, pair: Pair) -> HandOverCost:
        """Return the cost of reading it from a host, and what that is made of."""
        ms_per_byte, num_bytes = pair.ms_per_byte, round(self.num_bytes)
        fixed_ms = pair.fixed_ms + max(0.0, pair.latency_ms - shown.first_ms)
        transfer_ms = ms_per_byte * num_late(self.num_bytes, shown, self.bytes_per_token, ms_per_byte)
        wait_ms = 0.0 if from_host == self.host_id else ms_per_byte * self.num_lacking
        return HandOverCost(from_host, self.host_id, num_bytes, fixed_ms, transfer_ms, wait_ms, ms_per_byte)

    def ms(self, shown: Shown, from_host: str, pair: Pair) -> float:
        """Return only the sum: the router compares some ten of them for each request."""
        ms_per_byte = pair.ms_per_byte
        num_left = num_late(self.num_bytes, shown, self.bytes_per_token, ms_per_byte)
        if from_host != self.host_id:
            num_left += self.num_lacking
        return pair.fixed_ms + ms_per_byte * num_left + max(0.0, pair.latency_ms - shown.first_ms)


def num_late(num_bytes: float, shown: Shown, bytes_per_token: float, ms_per_byte: float) -> float:
    """Return how many of the bytes to move are left when prefill ends."""
    num_last = shown.num_last_tokens * bytes_per_token
    if num_last >= num_bytes:
        return num_bytes
    num_left = num_bytes - shown.overlap_ms / ms_per_byte
    return num_left if num_left > num_last else num_last


def chunk_tokens(figures: WorkerFigures) -> int:
    """Return the prompt tokens that a worker computes in a step."""
    return figures.chunk_tokens or _DEFAULT_CHUNK_TOKENS


def shown(
    figures: WorkerFigures, num_tokens: int, num_computed: int, compute_ms: float, first_ms: float = math.inf
) -> Shown:
    """Return what a prefill worker with these figures shows of a prompt; it computes `num_computed` of the tokens."""
    chunk = chunk_tokens(figures)
    if num_computed <= chunk:
        return Shown(num_tokens, num_computed, 0.0, first_ms)
    return Shown(num_tokens, chunk, compute_ms * (1 - chunk / num_computed), first_ms)


class Listener(Protocol):
    """What is told of changes."""

    def pair_changed(self, from_host: str, to_host: str) -> None:
        """Moving blocks between these hosts takes another time now."""

    def arena_changed(self, host_id: str) -> None: ...

    def host_changed(self, host_id: str) -> None:
        """All pairs with the host may be others: its KV service has come or gone."""


class HandOvers:
    """Knows the pairs of hosts and their arenas; by reports of KV services, and by hand-overs that have ended."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._learnt: OrderedDict[tuple[str, str], _Learnt] = OrderedDict()
        self._learnt_from: dict[str, set[str]] = {}
        """The same pairs: where blocks are moved to, by the host from where."""
        self._links: dict[str, dict[str, Link]] = {}
        """Of the KV service of a host: as they count now, by address."""
        self._readers: dict[str, set[str]] = {}
        """The hosts with a link to an address."""
        self._arenas: dict[str, Arena] = {}
        self._addresses: dict[str, str] = {}
        """Of the hosts' KV services."""
        self._host_at: dict[str, str] = {}
        """The hosts by these addresses."""
        self._pairs: dict[str, dict[str, Pair]] = {}
        """By the host that blocks are moved to, and by that from where: as they were found last.

        Of most pairs nothing is known. Those with one host are one object: new ones would be work for the collector.
        """
        self._num_pairs = 0
        self._strangers: dict[str, Pair] = {}
        self._listeners: list[Listener] = []
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        for worker in registry.workers(pb.WORKER_ROLE_KV):
            self._changed(worker, True)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    # ----------------------------------------------------------------------------------------------- predicting

    def cost(self, shown: Shown, from_host: str, reader: Worker, num_own: int = 0) -> HandOverCost:
        """Return the cost of handing a prompt over to a decode worker that has `num_own` of its tokens."""
        return self.reader(reader, shown.num_tokens, num_own).cost(
            shown, from_host, self.pair(from_host, reader.figures.host_id)
        )

    def reader(self, worker: Worker, num_tokens: int, num_own: int) -> Reader:
        """Return the reader of a prompt; it has `num_own` of its `num_tokens`."""
        figures = worker.figures
        host_id, size = figures.host_id, figures.bytes_per_token
        num_bytes, arena = max(0, num_tokens - num_own) * size, self._arenas.get(host_id)
        if arena is None or num_bytes <= arena.free_bytes:
            return Reader(host_id, size, num_bytes, 0.0)
        num_wanted = min(num_bytes, 2 * arena.window_bytes)
        return Reader(host_id, size, num_bytes, max(0.0, num_wanted - arena.free_bytes))

    def pair(self, from_host: str, to_host: str) -> Pair:
        """Return what moving blocks takes, as of this second."""
        found = self._pairs.get(to_host, _NO_PAIRS).get(from_host)
        if found is None or (found.until is not None and found.until <= self._clock()):
            return self._find(from_host, to_host)
        return found

    def pairs(self, from_hosts: Sequence[str], to_host: str) -> list[Pair]:
        """Return the same as `pair` of several hosts."""
        known, pair = self._pairs.get(to_host, _NO_PAIRS).get, self.pair
        return [
            found if (found := known(host)) is not None and found.until is None else pair(host, to_host)
            for host in from_hosts
        ]

    def _find(self, from_host: str, to_host: str) -> Pair:
        """Find a pair anew, and keep it."""
        found = self._found_now(from_host, to_host)
        if self._num_pairs >= 4 * MAX_PAIRS:
            self._forget_pairs()
        to_here = self._pairs.setdefault(to_host, {})
        self._num_pairs += from_host not in to_here
        to_here[from_host] = found
        return found

    def _found_now(self, from_host: str, to_host: str) -> Pair:
        if self._are_strangers(from_host, to_host):
            found = self._strangers.get(to_host)
            if found is None:
                known = self.of_strangers(to_host)
                found = self._strangers[to_host] = Pair(known.assumed_ms, known.assumed_ms_per_byte, known.latency_ms)
            return found
        known = self.known(from_host, to_host)
        fixed_ms, ms_per_byte = known.assumed_ms, known.assumed_ms_per_byte
        if known.learnt_at == -math.inf:
            return Pair(fixed_ms, ms_per_byte, known.latency_ms)
        at = whole_second(self._clock())
        share = float(share_left(known.learnt_at, at))
        fixed_ms += share * (known.learnt_ms - fixed_ms)
        ms_per_byte += share * (known.learnt_ms_per_byte - ms_per_byte)
        return Pair(fixed_ms, ms_per_byte, known.latency_ms, at + REFRESH_SECONDS)

    def known(self, from_host: str, to_host: str) -> Known:
        """Return what a pair is made of."""
        if from_host == to_host:
            assumed = _WITHIN_A_HOST
        else:
            link = self._links.get(to_host, _NO_LINKS).get(self._addresses.get(from_host, ""), ASSUMED_LINK)
            assumed = _assumed(link, self.arena(to_host).window_bytes)
        learnt = self._learnt.get((from_host, to_host))
        if learnt is None:
            return assumed
        return Known(assumed.assumed_ms, assumed.assumed_ms_per_byte, *learnt[1:], assumed.latency_ms)

    def of_strangers(self, to_host: str) -> Known:
        """Return what pairs with a host are made of where nothing is measured or learnt, except within the host."""
        return _assumed(ASSUMED_LINK, self.arena(to_host).window_bytes)

    def not_strange_to(self, from_host: str) -> set[str]:
        """Return the hosts of whose pairs with one host more is known than `of_strangers`."""
        readers = self._readers.get(self._addresses.get(from_host, ""), _NOBODY)
        return {from_host, *readers, *self._learnt_from.get(from_host, _NOBODY)}

    def _are_strangers(self, from_host: str, to_host: str) -> bool:
        if from_host == to_host or (from_host, to_host) in self._learnt:
            return False
        links = self._links.get(to_host)
        return links is None or self._addresses.get(from_host, "") not in links

    def arena(self, host_id: str) -> Arena:
        return self._arenas.get(host_id, _NO_ARENA)

    # ------------------------------------------------------------------------------------------------- learning

    def ended(self, shown: Shown, from_host: str, reader: Worker, num_bytes: int, took_ms: float) -> None:
        """Take in a hand-over of so many bytes; `took_ms`: from the first token, or from when decode took the request.

        Only the bytes count that were left when prefill ended, as was predicted, and nothing of the round trip.
        """
        key = from_host, reader.figures.host_id
        pair, known, now = self.pair(*key), self.known(*key), self._clock()
        num_left = num_late(num_bytes, shown, reader.figures.bytes_per_token, pair.ms_per_byte)
        before = self._learnt.pop(key, None)
        line = PairLine() if before is None else before.line.faded(float(share_left(before.at, now)))
        took_ms = max(0.0, min(MAX_HAND_OVER_MS, took_ms) - max(0.0, pair.latency_ms - shown.first_ms))
        line = line.plus(num_left, took_ms, pair.fixed_ms, pair.ms_per_byte)
        self._learnt[key] = _Learnt(line, *line.solved(known.assumed_ms, known.assumed_ms_per_byte), now)
        self._learnt_from.setdefault(key[0], set()).add(key[1])
        if len(self._learnt) > MAX_PAIRS:
            oldest = self._learnt.popitem(last=False)[0]
            _discard(self._learnt_from, *oldest)
            self._pair_changed(oldest)
        self._pair_changed(key)

    # ------------------------------------------------------------------------------------------------- following

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if worker.role != pb.WORKER_ROLE_KV:
            return
        host_id = worker.info.host_id
        service, before = self._registry.kv_service_of(host_id), self._addresses.get(host_id)
        address = None if service is None else service.info.address
        if before is not None and before != address:
            del self._addresses[host_id]
            if self._host_at.get(before) == host_id:
                del self._host_at[before]
            for other in self._links.pop(host_id, _NO_LINKS):
                _discard(self._readers, other, host_id)
            if self._arenas.pop(host_id, None) is not None:
                for listener in self._listeners:
                    listener.arena_changed(host_id)
        if service is not None and address is not None:
            self._addresses[host_id], self._host_at[address] = address, host_id
            self._reported(service)
        self._host_changed(host_id)

    def _reported(self, worker: Worker) -> None:
        """Most reports of KV services change nothing here."""
        host_id, figures = worker.info.host_id, worker.figures
        if worker.role != pb.WORKER_ROLE_KV or worker.info.address != self._addresses.get(host_id):
            return
        old = self.arena(host_id)
        if figures.arena is not None and figures.arena != old:
            self._arenas[host_id] = figures.arena
            if figures.arena.window_bytes != old.window_bytes:
                self._host_changed(host_id)
            for listener in self._listeners:
                listener.arena_changed(host_id)
        links = self._links.setdefault(host_id, {})
        for address in [*(links.keys() - figures.links.keys())]:
            del links[address]
            _discard(self._readers, address, host_id)
            self._pair_changed((self._host_at.get(address, ""), host_id))
        for address, link in figures.links.items():
            if not _is_same(links.get(address), link):
                links[address] = link
                self._readers.setdefault(address, set()).add(host_id)
                self._pair_changed((self._host_at.get(address, ""), host_id))

    def _host_changed(self, host_id: str) -> None:
        self._forget_pairs()
        for listener in self._listeners:
            listener.host_changed(host_id)

    def _pair_changed(self, key: tuple[str, str]) -> None:
        from_host, to_host = key
        if self._pairs.get(to_host, {}).pop(from_host, None) is not None:
            self._num_pairs -= 1
        for listener in self._listeners:
            listener.pair_changed(*key)

    def _forget_pairs(self) -> None:
        self._pairs.clear()
        self._strangers.clear()
        self._num_pairs = 0


def whole_second(now: float) -> float:
    """Return when what was learnt was refreshed last: at the same moments for whoever asks."""
    return now - now % REFRESH_SECONDS


def share_left(learnt_at: npt.ArrayLike, now: float) -> npt.NDArray[np.float64]:
    """Return how much still counts of what was learnt at these moments; all of it of what is newer than `now`."""
    return np.asarray(np.exp2(np.minimum(0.0, np.subtract(learnt_at, now)) / HALF_LIFE_SECONDS), np.float64)


@lru_cache(maxsize=1 << 15)
def _assumed(link: Link, window_bytes: float) -> Known:
    ms, ms_per_byte = _ASSUMED_FIXED_MS + link.latency_ms, link.ms_per_byte(window_bytes)
    return Known(ms, ms_per_byte, ms, ms_per_byte, -math.inf, link.latency_ms)


def _discard(sets: dict[str, set[str]], key: str, value: str) -> None:
    """Take a value out of the set of a key, and an empty set out of `sets`."""
    values = sets[key]
    values.discard(value)
    if not values:
        del sets[key]


def _is_same(old: Link | None, new: Link) -> bool:
    if old is None:
        return False
    return old.reads_at_once == new.reads_at_once and all(
        abs(now - before) <= _SAME * before
        for before, now in (
            (old.latency_ms, new.latency_ms),
            (old.bytes_per_second, new.bytes_per_second),
            (old.bytes_per_transfer, new.bytes_per_transfer),
        )
    )
