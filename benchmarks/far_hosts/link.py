"""A far link between two networks: packets of a TUN device each, passed on later and no faster than a rate.

Run as a module with the descriptors of both devices, the milliseconds of a round trip and the bits per second. It ends
with its standard input.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.namespaces import NetworkHost

_DEVICE = "far"
_LARGEST_PACKET_BYTES = 65_000
"""With packets of 1,500 bytes Python would pass on a tenth of a gigabit."""
_QUEUE_BYTES = 64 << 20
"""Of a direction; a packet beyond that is lost."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass
class Direction:
    """Packets on their way from one device to the other."""

    source: int
    target: int
    delay_seconds: float
    bytes_per_second: float
    _due: deque[tuple[float, bytes]] = field(default_factory=deque)
    _num_bytes: int = 0
    _free_at: float = 0.0

    def take(self, packet: bytes, now: float) -> None:
        """Put a packet on its way: behind those that wait for the line, and then for the distance."""
        if self._num_bytes + len(packet) > _QUEUE_BYTES:
            return
        self._free_at = max(now, self._free_at) + len(packet) / self.bytes_per_second
        self._num_bytes += len(packet)
        self._due.append((self._free_at + self.delay_seconds, packet))

    def arrived(self, now: float) -> Iterator[bytes]:
        """Yield the packets that are there."""
        while self._due and self._due[0][0] <= now:
            _, packet = self._due.popleft()
            self._num_bytes -= len(packet)
            yield packet

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None


def pass_on(directions: list[Direction]) -> None:
    """Pass packets on until standard input ends."""
    selector = selectors.DefaultSelector()
    for direction in directions:
        os.set_blocking(direction.source, False)
        selector.register(direction.source, selectors.EVENT_READ, direction)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        due = [at for each in directions if (at := each.next_at) is not None]
        seconds = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in selector.select(seconds):
            if key.data is None:
                return
            _drain(key.data)
        now = time.monotonic()
        for direction in directions:
            for packet in direction.arrived(now):
                os.write(direction.target, packet)


def _drain(direction: Direction) -> None:
    while True:
        try:
            packet = os.read(direction.source, _LARGEST_PACKET_BYTES + 1)
        except BlockingIOError:
            return
        direction.take(packet, time.monotonic())


@contextmanager
def far_link(
    a: NetworkHost, b: NetworkHost, addresses: tuple[str, str], round_trip_ms: float, bits_per_second: float
) -> Iterator[None]:
    """Join two hosts by a link with these addresses, in a process of its own."""
    devices = [host.run(_open_device) for host in (a, b)]
    for host, address, other in ((a, addresses[0], addresses[1]), (b, addresses[1], addresses[0])):
        host.ip(f"link set {_DEVICE} mtu {_LARGEST_PACKET_BYTES}")
        host.ip(f"address add {address} peer {other} dev {_DEVICE}")
        host.ip(f"link set {_DEVICE} up")
        host.run(_keep_windows)
    command = [sys.executable, "-m", "benchmarks.far_hosts.link", *map(str, devices)]
    command += [str(round_trip_ms), str(bits_per_second)]
    link = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
    for device in devices:
        os.close(device)
    try:
        yield
    finally:
        link.communicate()


def _open_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _keep_windows() -> None:
    """Let a connection that was idle go on as fast as before, not at ten packets a round trip."""
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")


def main() -> None:
    a, b = map(int, sys.argv[1:3])
    delay_seconds, bytes_per_second = float(sys.argv[3]) / 2000, float(sys.argv[4]) / 8
    pass_on([Direction(a, b, delay_seconds, bytes_per_second), Direction(b, a, delay_seconds, bytes_per_second)])


if __name__ == "__main__":
    main()
