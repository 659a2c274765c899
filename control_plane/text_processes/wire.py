"""The messages between a gateway, its zygote and its text processes, and their frames.

    gateway -> root zygote    Begin                    starts the first generation
    gateway -> generation     Spawn, Load              forks a text process; forks a generation with one tokenizer more
    generation -> gateway     Loaded, LoadFailed
    gateway -> text process   Run + raw body, then Use or Drop
    text process -> gateway   Hello once, then for each Run: Named, Done; or Failed

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
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from control_plane.generation import ModelFacts
from control_plane.text.prepared import Asked, PreparedBody, TextJob
from control_plane.text.vocabulary import VocabularyData

T = TypeVar("T")

_HEAD = struct.Struct("<IQ")
_MAX_DESCRIPTORS = 4
_READ_BYTES = 1 << 18


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


class Named(_Message, frozen=True):
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


class Failed(_Message, frozen=True):
    kind: str
    """The name of a TandemError; MEMORY; or "" for an unexpected exception."""
    message: str
    field: str = ""
    cpu_seconds: float = 0.0
    is_last: bool = False
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
    """The gateway's end, on its event loop. One task reads and one task writes at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._read_ahead = bytearray()
        self._num_waits = 0
        self._is_closing = False

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended, without waiting."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def receive(self) -> Message:
        """Raise Ended."""
        num_message, num_raw = _HEAD.unpack(await self._read(_HEAD.size))
        assert not num_raw, "only gateways send raw bytes"
        message: Message = _decoder.decode(await self._read(num_message))
        return message

    async def send(self, message: Message, raw: bytes = b"") -> None:
        """Raise Ended."""
        loop = asyncio.get_running_loop()
        with self._waiting():
            await loop.sock_sendall(self._connection, _framed(message, len(raw)))
            if raw:
                await loop.sock_sendall(self._connection, raw)

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
                await self._receive_some()

    def close(self) -> None:
        """End the connection. Tasks that wait for it get Ended; the last of them closes the socket.

        The event loop still watches the socket until then, and its number must not be given to another one.
        """
        self._is_closing = True
        if self._num_waits:
            with contextlib.suppress(OSError):  # the other end has closed it
                self._connection.shutdown(socket.SHUT_RDWR)
        else:
            self._connection.close()

    async def _read(self, num_bytes: int) -> bytes:
        held = self._read_ahead
        while len(held) < num_bytes:
            held += await self._receive_some()
        found = bytes(memoryview(held)[:num_bytes])
        del held[:num_bytes]
        return found

    async def _receive_some(self) -> bytes:
        """Return at least one byte. Raise Ended."""
        with self._waiting():
            piece = await asyncio.get_running_loop().sock_recv(self._connection, _READ_BYTES)
        if not piece:
            raise Ended
        return piece

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wait for the socket inside. Raise Ended if it is closed, here or at the other end."""
        if self._is_closing:
            raise Ended
        self._num_waits += 1
        try:
            yield
        except OSError as error:
            raise Ended from error
        finally:
            self._num_waits -= 1
            if self._is_closing and not self._num_waits:
                self._connection.close()


def _framed(message: Message, num_raw: int = 0) -> bytes:
    encoded = _encoder.encode(message)
    return _HEAD.pack(len(encoded), num_raw) + encoded


def anonymous_file(content: bytes = b"") -> int:
    """Return the descriptor of a file without a name that has this content, at its start."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tandem-text")
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
