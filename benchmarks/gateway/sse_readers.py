"""Reads many event streams at little cost: bare sockets that look only for the ends of events."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

_RECEIVE_BYTES = 1 << 16
_END_OF_EVENT = b"\n\n"
"""A JSON text has no bare newline in it."""
_TAIL_BYTES = 1024
_END_OF_ANSWER = b"\r\n0\r\n\r\n"
"""The last chunk of a chunked body."""
_CONNECT_SECONDS = 30.0
_WAIT_SECONDS = 0.2


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """Return an HTTP request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Stream:
    """One connection, on which the same is asked again whenever its answer has ended."""

    def __init__(self, address: tuple[str, int], request: bytes, buffer_bytes: int = 0) -> None:
        self.sock = socket.socket()
        self.sock.settimeout(_CONNECT_SECONDS)
        if buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.sock.connect(address)
        self.num_events = 0
        self.num_answers = 0
        self.is_cut = False
        """The other side has ended the connection."""
        self.tail = b""
        """The last bytes that came, in however many pieces: an error event and what ends the answer behind it."""
        self._request = request
        self.ask()
        self.sock.setblocking(False)

    @property
    def port(self) -> int:
        """The client's port, which identifies the server's side of the connection."""
        port: int = self.sock.getsockname()[1]
        return port

    def ask(self) -> None:
        self.sock.sendall(self._request)

    def receive(self) -> None:
        """Take what is there; raises RuntimeError for an answer that is an error."""
        try:
            piece = self.sock.recv(_RECEIVE_BYTES)
        except ConnectionError:
            piece = b""
        if not piece:
            self.is_cut = True
            return
        if not self.tail and not piece.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a stream was refused: {piece[:2000].decode(errors='replace')}")
        self.num_events += piece.count(_END_OF_EVENT) + (self.tail[-1:] == b"\n" == piece[:1])
        self.tail = piece[-_TAIL_BYTES:] if len(piece) >= _TAIL_BYTES else (self.tail + piece)[-_TAIL_BYTES:]
        if self.tail.endswith(_END_OF_ANSWER):
            self.num_answers += 1
            self.ask()


class Readers:
    """Some streams of one server, read by one thread: `with Readers(address, request, 256) as readers:`."""

    def __init__(self, address: tuple[str, int], request: bytes, num_streams: int, buffer_bytes: int = 0) -> None:
        """`buffer_bytes`: what our side's kernel takes for each while nobody reads; 0: as the system has it."""
        self._selector = selectors.DefaultSelector()
        self.streams = [Stream(address, request, buffer_bytes) for _ in range(num_streams)]
        for stream in self.streams:
            self._selector.register(stream.sock, selectors.EVENT_READ, stream)

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.sock.close()
        self._selector.close()

    @property
    def num_events(self) -> int:
        return sum(stream.num_events for stream in self.streams)

    @property
    def num_answers(self) -> int:
        return sum(stream.num_answers for stream in self.streams)

    def read_for(self, seconds: float) -> float:
        """Read so long; return how long it was."""
        started = time.perf_counter()
        while (left := started + seconds - time.perf_counter()) > 0:
            self._read(min(left, _WAIT_SECONDS))
        return time.perf_counter() - started

    def read_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Read until `condition`; raises TimeoutError."""
        deadline = time.perf_counter() + seconds
        while not condition():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"not so within {seconds:g} s; {self.num_events} events came")
            self._read(_WAIT_SECONDS)

    def all_have(self, num_events: int) -> bool:
        return all(stream.num_events >= num_events for stream in self.streams)

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            stream: Stream = key.data
            stream.receive()
            if stream.is_cut:
                self._selector.unregister(stream.sock)
