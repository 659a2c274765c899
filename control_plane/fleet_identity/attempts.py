"""Bounds how often one address may try to join or renew."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from tandem_runtime.errors import Overloaded

CALLS_PER_SECOND = 10.0
BURST = 200.0
"""So many processes may start at once on one machine, or behind one address."""
FAILURE_COST = 20.0
"""A refused call counts as so many: tokens cannot be guessed, but trying costs the database time."""
MAX_ADDRESSES = 4096


class Attempts:
    """A token bucket per address; the buckets that were used least recently are forgotten. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def start(self, address: str) -> None:
        """Count a call. Raise Overloaded if the address has made too many."""
        left = self._left(address)
        if left < 1.0:
            seconds = (1.0 - left) / CALLS_PER_SECOND
            raise Overloaded(
                f"too many calls from this address, the limit is {CALLS_PER_SECOND:g} a second after {BURST:g} at "
                f"once, and a refused one counts as {FAILURE_COST:g}; try again in {seconds:.1f} s",
                retry_after_seconds=seconds,
            )
        self._set(address, left - 1.0)

    def failed(self, address: str) -> None:
        """Count a refusal."""
        self._set(address, max(-BURST, self._left(address) - FAILURE_COST))

    def _left(self, address: str) -> float:
        now = self._clock()
        left, since = self._buckets.get(address, (BURST, now))
        return min(BURST, left + (now - since) * CALLS_PER_SECOND)

    def _set(self, address: str, left: float) -> None:
        self._buckets[address] = left, self._clock()
        self._buckets.move_to_end(address)
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)


def address_of(peer: str) -> str:
    """Return what is bounded of gRPC's name of a peer: an IPv4 address, or a whole /64, which one machine may have.

    >>> address_of("ipv4:10.0.0.5:50123"), address_of("ipv6:%5B2001:db8::1%5D:1"), address_of("unix:")
    ('10.0.0.5', '2001:db8::/64', 'unix:')
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return host
    return str(ipaddress.ip_network(f"{host}/64", strict=False)) if kind == "ipv6" else kind + ":"
