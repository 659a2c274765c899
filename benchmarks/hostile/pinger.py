"""Measures the lag of a gateway's event loop from outside: GET /healthz every 10 ms on one connection.

`python -m benchmarks.hostile.pinger HOST PORT`: each line on stdin is answered with one line of JSON, the seconds of
the round trips since the line before. A ping that is under way counts with its time so far.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time

_INTERVAL_SECONDS = 0.01
_PING = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_RECEIVE_BYTES = 1 << 16


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return bool(end) and length is not None and len(body) >= int(length[1])


def main() -> int:
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds: list[float] = []
    sent_at, next_at, answer = 0.0, time.monotonic(), b""
    while True:
        now = time.monotonic()
        if not sent_at and now >= next_at:
            sock.sendall(_PING)
            sent_at, next_at = now, max(next_at + _INTERVAL_SECONDS, now)
        wait = 1.0 if sent_at else max(0.0, next_at - now)
        readable = select.select([sock, sys.stdin], [], [], wait)[0]
        if sock in readable:
            piece = sock.recv(_RECEIVE_BYTES)
            if not piece:
                raise ConnectionError("the gateway closed the connection of the pings")
            answer += piece
            if _is_whole(answer):  # head and body may come apart
                seconds.append(time.monotonic() - sent_at)
                sent_at, answer = 0.0, b""
        if sys.stdin in readable:
            if not os.read(sys.stdin.fileno(), 1):
                return 0
            under_way = [time.monotonic() - sent_at] if sent_at else []
            print(json.dumps({"seconds": seconds + under_way}), flush=True)
            seconds = []


if __name__ == "__main__":
    sys.exit(main())
