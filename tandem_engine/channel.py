"""How do messages and descriptors pass over the socket pair between a front and its engine?

    frame:  | length: uint32 | num_fds: uint32 | JSON, `length` bytes |      little endian

Descriptors travel as SCM_RIGHTS with the first bytes of their frame, so they are here when the frame is complete.
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

from tandem_engine.codec import Codec, CodecError
from tandem_engine.messages import Command, EngineEvent
from tandem_engine.settings import EngineConfig

_HEADER = struct.Struct("<II")
_MAX_MESSAGE_BYTES = 256 << 20
_MAX_FDS = 16
_READ_BYTES = 256 << 10

MESSAGES = Codec([EngineConfig, *get_args(Command), *get_args(EngineEvent)])


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Received(NamedTuple):
    """A message and the descriptors that came with it, which the receiver owns now."""

    message: Any
    fds: tuple[int, ...]


class SyncChannel:
    """The engine's end: blocking writes, reads that wait or not."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._frames = _Frames()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Write one message whole; raises ChannelClosed if nobody reads any more."""
        data = memoryview(_frame(message, fds))
        try:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the front closed its socket") from error

    def has_come(self, within_seconds: float) -> bool:
        """Whether there is something to receive, at the latest after so many seconds."""
        return bool(select.select([self._socket], [], [], within_seconds)[0])

    def receive(self, *, wait: bool) -> list[Received]:
        """Return every complete message that has come; with `wait`, at least one. Raises ChannelClosed at the end."""
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
    """The front's end. Reads only when asked, so that a slow front holds the engine back instead of its memory."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = _Frames()
        self._ready: deque[Received] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Write one message: at once what the socket takes, the rest as soon as it can.

        Never waits: whoever sends has no turn of the event loop to lose. Raises ChannelClosed if the engine is gone,
        CodecError for what is no message; descriptors stay the caller's.
        """
        self._unsent.append((memoryview(_frame(message, fds)), [os.dup(fd) for fd in fds]))
        if len(self._unsent) == 1:
            self._write()

    async def receive(self) -> Received:
        """Return the next message; raises ChannelClosed at the end. One reader at a time."""
        while not self._ready:
            if not self._read_available():
                await self._wait_readable()
            self._ready.extend(self._frames.pop_all())
        return self._ready.popleft()

    def close(self) -> None:
        """Close the socket and the descriptors of messages that nobody read."""
        for received in self._ready:
            close_all(received.fds)
        self._ready.clear()
        self._frames.close()
        if self._unsent and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
        self._drop_unsent()
        self._socket.close()

    def _write(self) -> None:
        """Write what waits, as far as the socket takes it, and see to it that the rest follows."""
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                sent = self._send_some(data, fds)
            except ChannelClosed:
                self._drop_unsent()
                with contextlib.suppress(OSError):  # whatever it was, half a frame may have left: both ends are to know
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
            if sent is None:
                asyncio.get_running_loop().add_writer(self._socket.fileno(), self._go_on_writing)
                return
            close_all(fds)
            self._unsent[0] = data[sent:], []
            if sent == len(data):
                self._unsent.popleft()

    def _go_on_writing(self) -> None:
        asyncio.get_running_loop().remove_writer(self._socket.fileno())
        with contextlib.suppress(ChannelClosed):  # whoever reads is told
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
    """Bytes and descriptors in, whole messages out."""

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
                raise CodecError(f"a frame of {length} bytes with {num_fds} descriptors is not ours")
            end = start + _HEADER.size + length
            if end > len(self._buffer):
                break
            message = MESSAGES.decode(self._buffer[start + _HEADER.size : end])
            received.append(Received(message, tuple(self._fds.popleft() for _ in range(num_fds))))
            start = end
        del self._buffer[:start]
        return received

    def close(self) -> None:
        close_all(self._fds)
        self._fds.clear()


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


def _receive_some(sock: socket.socket, flags: int) -> tuple[bytes, array[int]]:
    """Read what is there; `socket.recv_fds` would do, if it did not drop its flags in Python 3.11."""
    fds = array("i")
    data, ancillary, _, _ = sock.recvmsg(
        _READ_BYTES, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), flags | socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds


def _frame(message: object, fds: Sequence[int]) -> bytes:
    body = MESSAGES.encode(message)
    if len(body) > _MAX_MESSAGE_BYTES:
        raise CodecError(f"{type(message).__name__} is {len(body)} bytes long, at most {_MAX_MESSAGE_BYTES} pass")
    return _HEADER.pack(len(body), len(fds)) + body
