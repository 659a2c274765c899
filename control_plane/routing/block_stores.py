"""Predicts what a worker finds of a prompt in caches: in its own pool, in its host's block store, in another host's.

A store may have less than the index says, and a link may be cut, which the index does not know: both are learnt from
requests, and unlearnt.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_figures import ASSUMED_LINK, Link, WorkerFigures
from control_plane.routing.hand_overs import HALF_LIFE_SECONDS, MAX_PAIRS
from control_plane.routing.prefix_index import CachedPrefix, PrefixMatch
from tandem.v1 import types_pb2 as pb

NOTHING_CACHED = CachedPrefix()
_MEMORY_BYTES_PER_SECOND = 5e9
"""From the host's store into a pool: one copy, beside other work."""
_OLD_WEIGHT = 0.8
"""Weight of earlier requests in a moving average."""
_LEAST_MISSED = 0.01
"""Of what was expected in another host's store; less is none."""
_NOT_MISSED = (0.0, 0.0)


class Store(NamedTuple):
    """The block store of a host, as of its last report."""

    address: str
    worker_id: str
    """Of its KV service."""
    links: Mapping[str, Link]
    """To other stores, by their addresses."""


class StoreListener(Protocol):
    """What is told of changes."""

    def store_changed(self, host_id: str) -> None:
        """A host's store has come or gone."""

    def hit_rate_changed(self, host_id: str) -> None:
        """A host's workers get another share of what its store is said to have."""

    def links_changed(self, host_id: str, addresses: Collection[str]) -> None:
        """A host's store has other links to the stores at these addresses."""

    def missed_changed(self, from_host: str, to_host: str) -> None:
        """One host gets another share of what the other's store is said to have."""


class BlockStores:
    """Follows the stores of all hosts. On the registry's event loop; `clock` gives monotonic seconds."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._stores: dict[str, Store] = {}
        """By host."""
        self._hit_rates: dict[str, float] = {}
        """By host: of what its store was said to have, the share that its workers got."""
        self._missed: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """Of what one host's store was said to have, the share that another host did not get, and when that was learnt.

        Monotonic seconds.
        """
        self._listeners: list[StoreListener] = []
        registry.listen(self._changed)
        registry.listen_to_loads(self._reported)
        for worker in registry.workers(pb.WORKER_ROLE_KV):
            self._reported(worker)

    def listen(self, listener: StoreListener) -> None:
        self._listeners.append(listener)

    # ------------------------------------------------------------------------------------------------- predicting

    def usable(self, match: PrefixMatch) -> PrefixMatch:
        """Return a match without the hosts that have no store to read from."""
        stores = self._stores
        for host in match.hosts:
            if host not in stores:
                return PrefixMatch(match.pools, {each: num for each, num in match.hosts.items() if each in stores})
        return match

    def caches(self, match: PrefixMatch, grain: int, num_tokens: int) -> PromptCaches | None:
        """Return what workers find of a prompt of so many tokens; None: nothing is cached. A block has `grain`."""
        return PromptCaches(self, match, grain, num_tokens) if match.pools or match.hosts else None

    def store(self, host_id: str) -> Store | None:
        return self._stores.get(host_id)

    def link(self, address: str, to_host: str) -> Link:
        """Return what fetches from the store at an address into a host's store take."""
        store = self._stores.get(to_host)
        return ASSUMED_LINK if store is None else store.links.get(address, ASSUMED_LINK)

    def hit_rate(self, host_id: str) -> float:
        """Return the share of what a host's store is said to have that its workers get."""
        return self._hit_rates.get(host_id, 1.0)

    def remote_hit_rate(self, from_host: str, to_host: str) -> float:
        """Return the share of what a host's store is said to have that another host gets; unlearnt by half a minute."""
        missed, at = self.missed(from_host, to_host)
        if not missed:
            return 1.0
        still: float = 0.5 ** ((self._clock() - at) / HALF_LIFE_SECONDS)
        return 1.0 - still * missed

    def missed(self, from_host: str, to_host: str) -> tuple[float, float]:
        """Return the share that was not there, and when that was learnt."""
        return self._missed.get((from_host, to_host), _NOT_MISSED) if self._missed else _NOT_MISSED

    # --------------------------------------------------------------------------------------------------- learning

    def used(self, host_id: str, num_expected_tokens: int, num_found: int) -> None:
        """Record how many of the tokens expected in a host's store were there."""
        if num_expected_tokens > 0:
            self._hit_rates[host_id] = _mixed(self.hit_rate(host_id), num_found / num_expected_tokens)
            self._tell_hit_rate(host_id)

    def used_from_afar(self, from_host: str, to_host: str, num_expected_tokens: int, num_found: int) -> None:
        """Record how many of the tokens expected in another host's store came from there."""
        if num_expected_tokens > 0:
            key = from_host, to_host
            missed = 1.0 - _mixed(self.remote_hit_rate(*key), num_found / num_expected_tokens)
            self._missed.pop(key, None)
            if missed > _LEAST_MISSED:
                self._missed[key] = missed, self._clock()
                if len(self._missed) > MAX_PAIRS:
                    self._tell_missed(self._missed.popitem(last=False)[0])
            self._tell_missed(key)

    # -------------------------------------------------------------------------------------------------- following

    def _changed(self, worker: Worker, is_here: bool) -> None:
        self._reported(worker)
        host_id = worker.info.host_id
        if not is_here and not any(other.info.host_id == host_id for other in self._registry.workers()):
            self._hit_rates.pop(host_id, None)
            self._tell_hit_rate(host_id)

    def _reported(self, worker: Worker) -> None:
        if worker.role != pb.WORKER_ROLE_KV:
            return
        host_id = worker.info.host_id
        store, before = self._registry.store_of(host_id), self._stores.get(host_id)
        if store is None:
            self._stores.pop(host_id, None)
        else:
            self._stores[host_id] = Store(store.info.address, store.worker_id, store.figures.links)
        if before is None and store is None:
            return
        if before is None or store is None or before.address != store.info.address:
            for listener in self._listeners:
                listener.store_changed(host_id)
        elif changed := _changed(before.links, store.figures.links):
            for listener in self._listeners:
                listener.links_changed(host_id, changed)

    def _tell_hit_rate(self, host_id: str) -> None:
        for listener in self._listeners:
            listener.hit_rate_changed(host_id)

    def _tell_missed(self, key: tuple[str, str]) -> None:
        for listener in self._listeners:
            listener.missed_changed(*key)


class PromptCaches:
    """Where one prompt is cached, as the index has it at this moment."""

    def __init__(self, stores: BlockStores, match: PrefixMatch, grain: int, num_tokens: int) -> None:
        self._stores, self._pools, self._hosts = stores, match.pools, match.hosts
        self.grain, self._num_tokens = grain, num_tokens
        self.from_host = from_host = max(match.hosts, key=match.hosts.__getitem__, default="")
        """Whose store the others fetch from."""
        source = stores.store(from_host) if from_host else None
        self.num_there = 0 if source is None else match.hosts[from_host]
        """Blocks in that store."""
        self.address, self._source_id = ("", "") if source is None else source[:2]
        """Of that store, and the id of its KV service."""
        self._nothing = NOTHING_CACHED, max(1, num_tokens), 0.0
        self._all_remote = self.cached(0, 0, grain * self.num_there)
        self._link: Link | None = None
        self._bytes_per_token = self._fetch_ms = 0.0
        """Of the last worker that had nothing of the prompt near: most have the same."""

    def of(self, incarnation: str, figures: WorkerFigures, rate: float) -> tuple[CachedPrefix, int, float]:
        """Return a worker's cached tokens, those left to compute, and the milliseconds of loading.

        `rate`: prompt tokens that the worker computes per second. What takes longer to fetch is computed.
        """
        size, host_id, stores = self.grain, figures.host_id, self._stores
        own, host = self._pools.get(incarnation, 0), self._hosts.get(host_id, 0)
        if not own and not host:
            return self._from_afar(host_id, figures, rate)
        host = host - own if host > own else 0
        remote = self.num_there - own - host
        num_found = load_ms = 0.0
        if host:
            num_found = size * host * stores.hit_rate(host_id)
            load_ms = 1000.0 * num_found * figures.bytes_per_token / _MEMORY_BYTES_PER_SECOND
        if remote > 0 and (store := stores.store(host_id)) is not None:
            num_fetched = size * remote * stores.remote_hit_rate(self.from_host, host_id)
            fetch_ms = _fetch_ms(store.links.get(self.address, ASSUMED_LINK), size * remote, figures.bytes_per_token)
            if fetch_ms < 1000.0 * num_fetched / rate:
                num_found += num_fetched
                cached = self.cached(size * own, size * host, size * remote)
                return cached, max(1, round(self._num_tokens - size * own - num_found)), load_ms + fetch_ms
        return (
            self.cached(size * own, size * host, 0),
            max(1, round(self._num_tokens - size * own - num_found)),
            load_ms,
        )

    def _from_afar(self, host_id: str, figures: WorkerFigures, rate: float) -> tuple[CachedPrefix, int, float]:
        """Return the same for a worker that has nothing of the prompt, as its host."""
        if not self.num_there or (store := self._stores.store(host_id)) is None:
            return self._nothing
        link, num_tokens = store.links.get(self.address, ASSUMED_LINK), self.grain * self.num_there
        if link is not self._link or figures.bytes_per_token != self._bytes_per_token:
            self._link, self._bytes_per_token = link, figures.bytes_per_token
            self._fetch_ms = _fetch_ms(link, num_tokens, figures.bytes_per_token)
        num_fetched = num_tokens * self._stores.remote_hit_rate(self.from_host, host_id)
        if self._fetch_ms >= 1000.0 * num_fetched / rate:
            return self._nothing
        return self._all_remote, max(1, round(self._num_tokens - num_fetched)), self._fetch_ms

    def cached(self, own: int, host: int, remote: int) -> CachedPrefix:
        """Return so many tokens, the last of them of the source."""
        if not remote:
            return CachedPrefix(own, host) if own or host else NOTHING_CACHED
        return CachedPrefix(own, host, remote, self.from_host, self.address, self._source_id)


def _changed(before: Mapping[str, Link], now: Mapping[str, Link]) -> Collection[str]:
    """Return the addresses whose links are others."""
    return [] if before == now else [each for each in {**before, **now} if before.get(each) != now.get(each)]


def _fetch_ms(link: Link, num_tokens: int, bytes_per_token: float) -> float:
    return link.latency_ms + 1000.0 * num_tokens * bytes_per_token / link.bytes_per_second_of_one


def _mixed(old: float, new: float) -> float:
    """Return a moving average of shares; `new` may be none of them."""
    return _OLD_WEIGHT * old + (1 - _OLD_WEIGHT) * min(1.0, max(0.0, new))
