"""Free ports that no other process takes before they are listened on."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return ports on 127.0.0.1 that are free, each given once to this process.

    They lie below the range from which the kernel takes ports for outgoing connections and for port 0. A port of that
    range may be taken again at once: by a process that asks for port 0, or by a client that dials the port before its
    server listens, which then connects to itself.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_range(), k=len(_range())):
        if len(ports) == count:
            break
        if port not in _given and _is_free(port):
            _given.add(port)
            ports.append(port)
    assert len(ports) == count, f"fewer than {count} ports of {_range()} are free"
    return ports


def free_port() -> int:
    """Return one port, as `free_ports` does."""
    return free_ports(1)[0]


def _range() -> range:
    lowest_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(_LOWEST, lowest_of_kernel) if lowest_of_kernel > _LOWEST + 1000 else range(_LOWEST, 65_536)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
