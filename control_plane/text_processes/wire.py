"""The messages between a gateway, its zygote and its text processes, and their frames.

    gateway -> root zygote    Begin                    starts the first generation
    gateway -> generation     Spawn, Load              forks a text process; forks a generation with one tokenizer more
    generation -> gateway     Loaded, LoadFailed
    gateway -> text process   Run + raw body, then Use or Drop if it asks
    text process -> gateway   Hello once, then for each Run: Named if it must ask, and Done or Failed

Frame: the length of the message (4 bytes), the length of the raw bytes (8), the message as MessagePack, the raw bytes.
Descriptors travel with the first byte. A connection that ends means that its process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from control_plane.generation import ModelFacts
from control_plane.text.prepared import Asked, PreparedBody, TextJob
from control_plane.text.vocabulary import VocabularyData
from tandem_machine.memfd import memory_file

T = TypeVar("T")

_HEAD = struct.Struct("<IQ")
_MAX_DESCRIPTORS = 4
_READ_BYTES = 1 << 18
_READ_AHEAD_BYTES = 1 << 14
_MAX_JOINED_BYTES = 1 << 16
"""A raw body up to this size travels in one call with its message, so that the reader wakes once."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Begin(_Message, frozen=True):
    """Descriptors: the control socket of the first generation, the public texts."""


class Spawn(_Message, frozen=True):
    """Descriptor: the socket of the text process."""

    is_background: bool
    """Run at low priority."""
    max_memory_bytes: int
    """Beyond what the process has at its start."""


class Load(_Message, frozen=True):
    """Descriptors: the control socket of the next generation, tokenizer.json, a TemplateFile, the vocabulary's file."""

    key: str
    model_id: str
    max_cpu_seconds: int
    max_memory_bytes: int
    forget: tuple[str, ...] = ()
    """Keys of tokenizers that the next generation does without."""


class Loaded(_Message, frozen=True):
    """The vocabulary's file has been written."""


class LoadFailed(_Message, frozen=True):
    reason: str


class Hello(_Message, frozen=True):
    pid: int


class Run(_Message, frozen=True):
    job: TextJob
    max_cpu_seconds: float
    """The gateway ends a longer job; if the gateway has died, the kernel does."""
    max_memory_bytes: int
    """Beyond what the process has before the job."""
    may_assume: bool = False
    """A name that the process was told of before may still mean the same model; the gateway checks that at the end."""


class Named(_Message, frozen=True):
    """Asks which model the body is for. Answered by Use or Drop."""

    asked: Asked


class Use(_Message, frozen=True):
    model: ModelFacts
    key: str
    """Of the tokenizer."""


class Drop(_Message, frozen=True):
    """Forget the job."""


class Done(_Message, frozen=True):
    body: PreparedBody
    cpu_seconds: float
    """Of the process, since its start."""
    is_last: bool = False
    """The process has grown, and ends now."""
    assumed: Asked | None = None
    """Set if the process did not ask: the body was prepared for the model that this name meant last."""


class Failed(_Message, frozen=True):
    kind: str
    """The name of a TandemError; MEMORY; or "" for an unexpected exception."""
    message: str
    field: str = ""
    cpu_seconds: float = 0.0
    is_last: bool = False
    assumed: Asked | None = None
    exception: str = ""
    """Of an unexpected exception: its type. Its text may have the prompt."""
    frames: tuple[str, ...] = ()


MEMORY = "memory"

Message = Begin | Spawn | Load | Loaded | LoadFailed | Hello | Run | Named | Use | Drop | Done | Failed


class TemplateFile(msgspec.Struct, frozen=True):
    """What a model's chats are rendered with."""

    special_tokens: dict[str, Any]
    chat_template: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Ended(Exception):
    """The process at the other end has ended."""


class Channel:
    """The blocking end, in the zygote and in text processes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def receive(self) -> tuple[Message, bytes, list[int]]:
        """Return a message, its raw bytes and descriptors. Raise Ended."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self.connection, _HEAD.size, _MAX_DESCRIPTORS)
            head += self._read(_HEAD.size - len(head)) if head else b""
            if not head:
                raise Ended
            num_message, num_raw = _HEAD.unpack(head)
            return _decoder.decode(self._read(num_message)), self._read(num_raw), descriptors
        except ConnectionError as error:
            raise Ended from error

    def send(self, message: Message) -> None:
        """Raise Ended."""
        try:
            self.connection.sendall(_framed(message))
        except ConnectionError as error:
            raise Ended from error

    def _read(self, num_bytes: int) -> bytes:
        first = self.connection.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if len(first) == num_bytes:  # always, unless a signal came
            return first
        pieces, missing = [first], num_bytes - len(first)
        while missing:
            piece = self.connection.recv(min(missing, _READ_BYTES))
            if not piece:
                raise Ended
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


class AsyncChannel:
    """The gateway's end, on its event loop. One task reads and one task writes at a time.

    The loop watches the socket from the start to the end, so no message costs a change of what the loop watches.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        """Bytes that have come, before the head of the next message is whole."""
        self._message: bytearray | None = None
        """The message that is being read, and how much of it has come."""
        self._num_read = 0
        self._arrived: deque[bytearray] = deque()
        """Whole messages. While one is here and nobody waits, nothing more is read."""
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = self._is_watched = self._is_closing = False
        self._num_sending = 0
        self._watch()

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended, without waiting."""
        if self._has_ended:
            return True
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def receive(self) -> Message:
        """Raise Ended. After a cancelled call, the next one goes on with the same message."""
        while not self._arrived:
            if self._has_ended or self._is_closing:
                raise Ended
            self._watch()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message: Message = _decoder.decode(self._arrived.popleft())
        return message

    async def send(self, message: Message, raw: bytes = b"") -> None:
        """Raise Ended."""
        framed = _framed(message, len(raw))
        is_small = len(raw) <= _MAX_JOINED_BYTES
        with self._sending():
            await self._loop.sock_sendall(self._connection, framed + raw if is_small else framed)
            if not is_small:
                await self._loop.sock_sendall(self._connection, raw)

    def send_descriptors(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send a small message with descriptors, without waiting. Raise Ended."""
        framed = _framed(message)
        try:
            num_sent = socket.send_fds(self._connection, [framed], descriptors)
        except OSError as error:
            raise Ended from error
        assert num_sent == len(framed), "the socket's buffer has room for a small message"

    async def wait_ended(self) -> None:
        """Return once the process has ended; it sends nothing any more."""
        with contextlib.suppress(Ended):
            while True:
                await self.receive()

    def close(self) -> None:
        """End the connection. Tasks that wait for it get Ended; a task that sends closes the socket.

        The event loop still watches the socket until then, and its number must not be given to another one.
        """
        self._is_closing = True
        self._unwatch()
        self._wake()
        if self._num_sending:
            with contextlib.suppress(OSError):  # the other end has closed it
                self._connection.shutdown(socket.SHUT_RDWR)
        else:
            self._connection.close()

    def _watch(self) -> None:
        if not self._is_watched:
            self._loop.add_reader(self._connection, self._read_some)
            self._is_watched = True

    def _unwatch(self) -> None:
        """Before the socket is closed: the loop would not watch the next socket with its number."""
        if self._is_watched:
            self._loop.remove_reader(self._connection)
            self._is_watched = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_some(self) -> None:
        """Read once, so that other tasks run between the pieces of a long message."""
        try:
            num_bytes = self._read_once()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._has_ended = True
            self._unwatch()
            self._wake()
            return
        self._take_messages()
        if self._arrived and self._waiter is None:
            self._unwatch()

    def _read_once(self) -> int:
        """Return the number of bytes that came; 0 at the end. No byte of a long message is copied twice."""
        if self._message is not None:
            num_bytes = self._connection.recv_into(memoryview(self._message)[self._num_read :])
            self._num_read += num_bytes
            return num_bytes
        piece = self._connection.recv(_READ_AHEAD_BYTES)
        self._held += piece
        return len(piece)

    def _take_messages(self) -> None:
        """Move what has come into messages, and wake the reader for each that is whole."""
        held = self._held
        while True:
            if self._message is None:
                if len(held) < _HEAD.size:
                    return
                num_bytes, num_raw = _HEAD.unpack_from(held)
                assert not num_raw, "only gateways send raw bytes"
                self._message, self._num_read = bytearray(num_bytes), min(num_bytes, len(held) - _HEAD.size)
                end = _HEAD.size + self._num_read
                self._message[: self._num_read] = memoryview(held)[_HEAD.size : end]
                del held[:end]
            if self._num_read < len(self._message):
                return
            self._arrived.append(self._message)
            self._message = None
            self._wake()

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Send inside. Raise Ended if the socket is closed, here or at the other end."""
        if self._is_closing:
            raise Ended
        self._num_sending += 1
        try:
            yield
        except OSError as error:
            raise Ended from error
        finally:
            self._num_sending -= 1
            if self._is_closing and not self._num_sending:
                self._connection.close()


def _framed(message: Message, num_raw: int = 0) -> bytes:
    encoded = _encoder.encode(message)
    return _HEAD.pack(len(encoded), num_raw) + encoded


def anonymous_file(content: bytes = b"") -> int:
    """Return the descriptor of a file without a name that has this content, at its start."""
    if hasattr(os, "memfd_create"):
        descriptor = memory_file("tandem-text")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_file(descriptor: int) -> bytes:
    """Return all of a file, and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def encode(content: VocabularyData | TemplateFile | dict[str, str]) -> bytes:
    return _encoder.encode(content)


def read_as(kind: type[T], descriptor: int) -> T:
    """Return what a file has, and close it."""
    return msgspec.msgpack.decode(read_file(descriptor), type=kind)


def write_file(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
