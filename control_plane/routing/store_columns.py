"""Columns of the block stores of a table's hosts, and of fetches to them from a store; made when first asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from control_plane.routing.block_stores import BlockStores
from control_plane.routing.compiled_library import address

Floats = npt.NDArray[np.float64]

_MAX_ENTRIES = 1 << 18
"""Of fetches; 32 bytes each."""


class _Fetches:
    """From one host's store, at an address."""

    def __init__(self, address_of_store: str, values: Floats) -> None:
        """`values`: latency, bytes per second, the share that is missed, and when that was learnt; [4, hosts]."""
        self.address, self.values = address_of_store, values
        self.addresses = tuple([address(each, np.float64) for each in values])


class StoreColumns:
    """Of the hosts of one table."""

    def __init__(self, hosts: Iterable[str], stores: BlockStores) -> None:
        self.hosts = tuple(hosts)
        self._places = {host: place for place, host in enumerate(self.hosts)}
        self._stores = stores
        self._values = np.array([self._of(host) for host in self.hosts], np.float64).T.copy("C")
        """Whether there is a store, and the share that is got of what it is said to have; [2, hosts]."""
        self.addresses = tuple([address(each, np.float64) for each in self._values])
        self._fetches: OrderedDict[str, _Fetches] = OrderedDict()
        """By host whose store is read, the one that was made last at the end."""

    def fetches(self, from_host: str, address_of_store: str) -> tuple[int, ...]:
        """Return the addresses of the four columns of fetches from a host's store; see `_Fetches`."""
        found = self._fetches.get(from_host)
        if found is None or found.address != address_of_store:
            columns = [self._of_fetch(from_host, address_of_store, host) for host in self.hosts]
            found = _Fetches(address_of_store, np.array(columns, np.float64).T.copy("C"))
            self._fetches.pop(from_host, None)
            self._fetches[from_host] = found
            while len(self._fetches) > max(1, _MAX_ENTRIES // len(self.hosts)):
                self._fetches.popitem(last=False)
        return found.addresses

    def store_changed(self, host_id: str) -> None:
        self.hit_rate_changed(host_id)
        self._changed(host_id, self._fetches)

    def hit_rate_changed(self, host_id: str) -> None:
        if (place := self._places.get(host_id)) is not None:
            self._values[:, place] = self._of(host_id)

    def links_changed(self, host_id: str, addresses: Collection[str]) -> None:
        self._changed(host_id, [host for host, fetches in self._fetches.items() if fetches.address in addresses])

    def missed_changed(self, from_host: str, to_host: str) -> None:
        if from_host in self._fetches:
            self._changed(to_host, [from_host])

    def _changed(self, to_host: str, from_hosts: Iterable[str]) -> None:
        place = self._places.get(to_host)
        if place is not None:
            for from_host in from_hosts:
                fetches = self._fetches[from_host]
                fetches.values[:, place] = self._of_fetch(from_host, fetches.address, to_host)

    def _of(self, host: str) -> tuple[float, float]:
        return float(self._stores.store(host) is not None), self._stores.hit_rate(host)

    def _of_fetch(self, from_host: str, address_of_store: str, to_host: str) -> tuple[float, ...]:
        link = self._stores.link(address_of_store, to_host)
        return link.latency_ms, link.bytes_per_second_of_one, *self._stores.missed(from_host, to_host)
