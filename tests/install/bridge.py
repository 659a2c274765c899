"""A network of containers as Docker makes one: a bridge, and for each container an address and a name of its own."""

from __future__ import annotations

import os
from contextlib import ExitStack

from benchmarks.lib.namespaces import NetworkHost

_SUBNET = "10.231.5"


class Bridge:
    """The bridge. `close` ends every network that it made."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._hub = self._new("hub", f"{_SUBNET}.1")
        self._hub.ip("link add fleet type bridge")
        self._hub.ip(f"address add {self._hub.address}/24 dev fleet")
        self._hub.ip("link set fleet up")
        self.addresses: dict[str, str] = {}

    def attach(self, name: str) -> NetworkHost:
        """Make the network of one container, which others reach at its address; `addresses` has its name then."""
        host = self._new(name, f"{_SUBNET}.{len(self.addresses) + 2}")
        cable = f"veth{len(self.addresses)}"
        self._hub.ip(
            f"link add {cable} type veth peer name eth0 netns /proc/{os.getpid()}/task/{host.thread_id}/ns/net"
        )
        self._hub.ip(f"link set {cable} master fleet up")
        host.ip(f"address add {host.address}/24 dev eth0")
        host.ip("link set eth0 up")
        host.ip(f"route add default via {self._hub.address}")
        self.addresses[name] = host.address
        return host

    def alone(self, name: str) -> NetworkHost:
        """Make a network with loopback and nothing else (`network_mode: none`)."""
        return self._new(name, "127.0.0.1")

    def close(self) -> None:
        self._opened.close()

    def _new(self, name: str, address: str) -> NetworkHost:
        host = NetworkHost(name, address)
        self._opened.callback(host.close)
        host.ip("link set lo up")
        return host
