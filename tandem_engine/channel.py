"""Sends messages and descriptors over the socket pair between a front and its engine.

    frame:  | length: uint32 | num_fds: uint32 | MessagePack, `length` bytes |      little endian

Descriptors travel as SCM_RIGHTS with the first bytes of their frame, so they arrive before the frame is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from tandem_engine.encoder.messages import EncoderCommand, EncoderEvent
from tandem_engine.messages import Command, EngineEvent
from tandem_engine.settings import EngineConfig

_HEADER = struct.Struct("<II")
_MAX_MESSAGE_BYTES = 256 << 20
_MAX_FDS = 16
_READ_BYTES = 256 << 10

_Any = EngineConfig | Command | EngineEvent | EncoderCommand | EncoderEvent
_KINDS = frozenset(get_args(_Any))
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Any)


class InvalidMessage(ValueError):
    """The bytes are no message, or the value is no message of this channel."""


def encode(message: object) -> bytes:
    """Return the bytes of a message; raises InvalidMessage."""
    if type(message) not in _KINDS:
        raise InvalidMessage(f"{type(message).__name__} is not a message of this channel")
    return _ENCODER.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the message; raises InvalidMessage, with the path of the wrong field."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested thousands deep
        raise InvalidMessage(f"a frame of {len(data)} bytes is not a message: {error}") from error


class ChannelClosed(ConnectionError):
    """The process at the other end is gone."""


class Received(NamedTuple):
    """A message and its descriptors; the receiver owns the descriptors."""

    message: Any
    fds: tuple[int, ...]


class SyncChannel:
    """The engine's end: writes block, reads wait on request."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._frames = _Frames()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Write one whole message; raises ChannelClosed if the front is gone."""
        data = memoryview(_frame(message, fds))
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the front closed its socket") from error

    def has_come(self, within_seconds: float) -> bool:
        """Wait up to `within_seconds`; return whether there is something to receive."""
        return bool(select.select([self._socket], [], [], within_seconds)[0])

    def wait_with(self, eventfd: int) -> None:
        """Wait until there is something to receive or the eventfd is written; set the eventfd to 0 again."""
        if eventfd in select.select([self._socket.fileno(), eventfd], [], [])[0]:
            os.eventfd_read(eventfd)

    def receive(self, *, wait: bool) -> list[Received]:
        """Return every complete message that has arrived; with `wait`, at least one. Raises ChannelClosed."""
        received: list[Received] = []
        while self._read(wait=wait and not received):
            received += self._frames.pop_all()
        return received

    def _read(self, *, wait: bool) -> bool:
        try:
            data, fds = _receive_some(self._socket, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise ChannelClosed("the front closed its socket") from error
        if not data:
            raise ChannelClosed("the front closed its socket")
        self._frames.feed(data, fds)
        return True


class AsyncChannel:
    """The front's end. Reads only in `receive`, so a slow front delays the engine instead of filling memory."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = _Frames()
        self._ready: deque[Received] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Write one message: what the socket accepts now, the rest when it becomes writable.

        Never waits. Raises ChannelClosed if the engine is gone, InvalidMessage for a value that is no message. The
        caller keeps the descriptors.
        """
        self._unsent.append((memoryview(_frame(message, fds)), [os.dup(fd) for fd in fds]))
        if len(self._unsent) == 1:
            self._write()

    async def receive(self) -> Received:
        """Return the next message; raises ChannelClosed at the end. Only one reader may wait at a time."""
        while not self._ready:
            if not self._read_available():
                await self._wait_readable()
            self._ready.extend(self._frames.pop_all())
        return self._ready.popleft()

    def close(self) -> None:
        """Close the socket and the descriptors of unread messages."""
        for received in self._ready:
            close_all(received.fds)
        self._ready.clear()
        self._frames.close()
        if self._unsent and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
        self._drop_unsent()
        self._socket.close()

    def _write(self) -> None:
        """Write queued frames until the socket is full; the event loop writes the rest."""
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                sent = self._send_some(data, fds)
            except ChannelClosed:
                self._drop_unsent()
                with contextlib.suppress(OSError):  # half a frame may have left: close both ends
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
            if sent is None:
                asyncio.get_running_loop().add_writer(self._socket.fileno(), self._continue_writing)
                return
            close_all(fds)
            self._unsent[0] = data[sent:], []
            if sent == len(data):
                self._unsent.popleft()

    def _continue_writing(self) -> None:
        asyncio.get_running_loop().remove_writer(self._socket.fileno())
        with contextlib.suppress(ChannelClosed):  # the reader gets the error
            self._write()

    def _drop_unsent(self) -> None:
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()

    def _send_some(self, data: memoryview, fds: Sequence[int]) -> int | None:
        try:
            return socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed("the engine closed its socket") from error

    def _read_available(self) -> bool:
        try:
            data, fds = _receive_some(self._socket, 0)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed("the engine closed its socket") from error
        if not data:
            raise ChannelClosed("the engine closed its socket")
        self._frames.feed(data, fds)
        return True

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        if self._socket.fileno() < 0:
            raise ChannelClosed("the channel is closed")
        number = self._socket.fileno()
        woken: asyncio.Future[None] = loop.create_future()
        loop.add_reader(number, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            loop.remove_reader(number)


class _Frames:
    """Turns bytes and descriptors into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def pop_all(self) -> list[Received]:
        received = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._buffer, start)
            if length > _MAX_MESSAGE_BYTES or num_fds > len(self._fds):
                raise InvalidMessage(f"a frame of {length} bytes with {num_fds} descriptors is not valid")
            end = start + _HEADER.size + length
            if end > len(self._buffer):
                break
            message = decode(self._buffer[start + _HEADER.size : end])
            received.append(Received(message, tuple(self._fds.popleft() for _ in range(num_fds))))
            start = end
        del self._buffer[:start]
        return received

    def close(self) -> None:
        close_all(self._fds)
        self._fds.clear()


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors that nobody needs."""
    for fd in fds:
        os.close(fd)


def _receive_some(sock: socket.socket, flags: int) -> tuple[bytes, array[int]]:
    """Read what is available; `socket.recv_fds` of Python 3.11 ignores its flags."""
    fds = array("i")
    data, ancillary, _, _ = sock.recvmsg(
        _READ_BYTES, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), flags | socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds


def _frame(message: object, fds: Sequence[int]) -> bytes:
    body = encode(message)
    if len(body) > _MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"{type(message).__name__} has {len(body)} bytes, the limit is {_MAX_MESSAGE_BYTES}")
    return _HEADER.pack(len(body), len(fds)) + body
