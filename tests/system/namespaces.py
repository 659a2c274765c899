"""Two hosts on one machine, joined by a cable that is captured."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.lib.namespaces import NetworkHost, join, why_not

_ETH_P_ALL = 0x0003
_ETH_P_IP = 0x0800
_SOL_PACKET = 263
_PACKET_STATISTICS = 6
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 << 20
_LARGEST_FRAME_BYTES = 1 << 17
"""Segmentation offload hands over frames far beyond the cable's 1,500 bytes."""


@contextmanager
def two_hosts() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    """Make two hosts with a cable between them. Skips where this process may not."""
    require_namespaces()
    with ExitStack() as opened:
        a, b = NetworkHost("a", "10.231.0.1"), NetworkHost("b", "10.231.0.2")
        for host in (a, b):
            opened.callback(host.close)
        join(a, b)
        yield a, b


def require_namespaces() -> None:
    """Skip with a sentence where no network can be made."""
    if reason := why_not():
        pytest.skip(reason)


class Capture:
    """Keeps all frames that pass the cable at one host, until it is closed."""

    def __init__(self, host: NetworkHost) -> None:
        self._frames: list[bytes] = []
        self._socket = host.run(_packet_socket)
        self._socket.settimeout(0.2)
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, name="capture", daemon=True)
        self._thread.start()

    def close(self) -> Captured:
        """Stop, and return what passed. Fails if the kernel has dropped a frame: nothing could be said then."""
        self._is_closed = True
        self._thread.join()
        num_frames, num_dropped = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self._socket.close()
        assert num_dropped == 0, f"{num_dropped} of {num_frames} frames were not captured"
        return Captured(self._frames)

    def _read(self) -> None:
        """Read until closed, and then what is still in the buffer."""
        while True:
            try:
                self._frames.append(self._socket.recv(_LARGEST_FRAME_BYTES))
            except TimeoutError:
                if self._is_closed:
                    return


def _packet_socket() -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    sock.bind(("cable", _ETH_P_ALL))
    return sock


class Captured:
    """The frames of a cable, and the bytes of each direction of each TCP connection on it."""

    def __init__(self, frames: list[bytes]) -> None:
        self.num_bytes = sum(map(len, frames))
        self.streams = _tcp_streams(frames)
        self._others = [frame for frame in frames if _tcp_segment(frame) is None]

    def count(self, needle: bytes) -> int:
        """Return how often `needle` passed, also where it was cut into two segments."""
        return sum(each.count(needle) for each in (*self.streams.values(), *self._others))


Direction = tuple[bytes, int, bytes, int]


def _tcp_streams(frames: list[bytes]) -> dict[Direction, bytes]:
    """Return the bytes of each direction in the order of their arrival: the cable neither loses nor reorders."""
    segments: dict[Direction, list[bytes]] = {}
    for frame in frames:
        if (segment := _tcp_segment(frame)) is not None:
            segments.setdefault(segment[0], []).append(segment[1])
    return {direction: b"".join(parts) for direction, parts in segments.items()}


def _tcp_segment(frame: bytes) -> tuple[Direction, bytes] | None:
    """Return direction and payload of a frame with IPv4 (RFC 791) and TCP (RFC 9293); None for any other frame."""
    packet = frame[14:]
    if len(packet) < 40 or struct.unpack_from("!H", frame, 12)[0] != _ETH_P_IP or packet[9] != socket.IPPROTO_TCP:
        return None
    num_total_bytes = struct.unpack_from("!H", packet, 2)[0] or len(packet)
    segment = packet[(packet[0] & 0xF) * 4 : num_total_bytes]
    source_port, target_port = struct.unpack_from("!HH", segment)
    direction = packet[12:16], source_port, packet[16:20], target_port
    return direction, segment[(segment[12] >> 4) * 4 :]
