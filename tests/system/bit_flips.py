"""Flips bits in another process's memory, in a file and on a connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.ports import free_port

_CHUNK_BYTES = 1 << 16
_BIG_CHUNK_BYTES = 4096


def flip_memory(pid: int, name: str, stride: int, num_bytes: int) -> None:
    """Flip one bit in each `stride` bytes of the first `num_bytes` of a process's memfd of that name."""
    folder = Path(f"/proc/{pid}/fd")
    found = {}
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if str(entry.readlink()).startswith(f"/memfd:{name} "):
                found[entry.stat().st_ino] = entry  # a process may hold one memfd twice
    assert len(found) == 1, f"process {pid} has {len(found)} memfds called {name}"
    fd = os.open(next(iter(found.values())), os.O_RDWR)
    try:
        for offset in range(stride // 2, num_bytes, stride):
            _flip(fd, offset)
    finally:
        os.close(fd)


def flip_files(folder: Path, stride: int) -> int:
    """Flip one bit in each `stride` bytes of all files below a folder; return how many."""
    return sum(_flip_file(path, stride) for path in folder.rglob("*") if path.is_file())


def _flip_file(path: Path, stride: int) -> int:
    fd = os.open(path, os.O_RDWR)
    try:
        offsets = range(stride // 2, os.fstat(fd).st_size, stride)
        for offset in offsets:
            _flip(fd, offset)
    finally:
        os.close(fd)
    return len(offsets)


def _flip(fd: int, offset: int) -> None:
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ 0x10]), offset)


def engine_pid(worker_pid: int) -> int:
    """Return the engine process of a worker's front."""
    (engine,) = psutil.Process(worker_pid).children()
    return int(engine.pid)


class BadWire:
    """Passes TCP connections on; while `is_bad`, one bit of every large piece that comes back is flipped."""

    def __init__(self) -> None:
        self.is_bad = False
        self.num_flipped = 0
        self.address = ""
        self.target_port = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[BadWire]:
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            self.target_port = free_port()  # only now: it is not the one we listen on
            yield self
        finally:
            server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        ways = [self._copy(reader, far_writer), self._copy(far_reader, writer, may_flip=True)]
        try:
            await asyncio.gather(*ways)
        except ConnectionError:
            pass  # one end has left: so does the other
        finally:
            writer.close()
            far_writer.close()

    async def _copy(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, may_flip: bool = False) -> None:
        while piece := await source.read(_CHUNK_BYTES):
            if may_flip and self.is_bad and len(piece) >= _BIG_CHUNK_BYTES:
                middle = len(piece) // 2
                piece = piece[:middle] + bytes([piece[middle] ^ 0x10]) + piece[middle + 1 :]
                self.num_flipped += 1
            to.write(piece)
            await to.drain()
        to.close()
