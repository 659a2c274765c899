"""Reads token streams in a process of its own, and records the gaps between their tokens.

`python -m benchmarks.hostile.gap_reader HOST PORT` reads one request (JSON: {"request": hex, "num_streams": N}) from
stdin. Each further line on stdin is answered with one line of JSON: the gaps in seconds since the line before, and how
many streams have ended or were refused. A gap that is still open counts with its length so far.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time

_RECEIVE_BYTES = 1 << 16
_END_OF_EVENT = b"\n\n"


class _Stream:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.last_at = 0.0
        self.has_begun = False
        self.num_ends = 0

    def receive(self) -> list[float]:
        """Return the gaps that ended with what has come; [] at the end of the stream, which is counted."""
        try:
            piece = self.sock.recv(_RECEIVE_BYTES)
        except ConnectionError:
            piece = b""
        refused = not self.has_begun and not piece.startswith(b"HTTP/1.1 200")
        if not piece or refused or piece.endswith(b"\r\n0\r\n\r\n"):
            self.num_ends += 1
            return []
        now, was_begun = time.monotonic(), self.has_begun
        self.has_begun = True
        num_events = piece.count(_END_OF_EVENT)
        if not num_events:
            return []
        gap, self.last_at = now - self.last_at, now
        return [gap, *([0.0] * (num_events - 1))] if was_begun and gap < now else []


def _first_line() -> bytes:
    """Read without a buffer, in which later lines would wait unnoticed by the selector."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def main() -> int:
    address = sys.argv[1], int(sys.argv[2])
    asked = json.loads(_first_line())
    selector = selectors.DefaultSelector()
    streams = []
    for _ in range(asked["num_streams"]):
        sock = socket.create_connection(address)
        sock.sendall(bytes.fromhex(asked["request"]))
        sock.setblocking(False)
        streams.append(_Stream(sock))
        selector.register(sock, selectors.EVENT_READ, streams[-1])
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    gaps: list[float] = []
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                gaps += key.data.receive()
                if key.data.num_ends:
                    selector.unregister(key.data.sock)
                continue
            if not os.read(sys.stdin.fileno(), 1):
                return 0
            now = time.monotonic()
            open_gaps = [now - each.last_at for each in streams if each.last_at and not each.num_ends]
            ready = sum(each.has_begun for each in streams)
            ends = sum(each.num_ends for each in streams)
            longest = max(open_gaps, default=0.0)
            print(json.dumps({"gaps": gaps, "open": longest, "num_begun": ready, "num_ended": ends}), flush=True)
            gaps = []


if __name__ == "__main__":
    sys.exit(main())
