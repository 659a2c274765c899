"""The Unix socket of `tandem up`, over which `tandem up --replace` asks it to replace workers.

One connection is one call. The caller sends a line of JSON, and gets lines of JSON until the socket closes. Only the
same user can call: the socket has mode 0600, its folder 0700, and on Linux both sides look at the other's user.

    {"call": "workers"}                             -> {"workers": [...], "version": 1}
    {"call": "replace", "steps": [...], ...}        -> {"name": ..., "what": ...} ... {"end": ""}
    {"call": "cancel"}, or the connection closes    -> a replacement that runs is taken back

`end` is why the replacement was taken back, "" if it was not. A call that is refused gets {"error": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

VERSION = 1
MAX_LINE_BYTES = 1 << 20
_MAX_CALLERS = 4
_FIRST_LINE_SECONDS = 10.0
_MAX_PATH_BYTES = 100
"""Of an address in AF_UNIX: 108 on Linux, 104 on macOS."""

Send = Callable[[dict[str, Any]], None]
Call = Callable[[dict[str, Any], Send, asyncio.Event], Awaitable[None]]
"""Called with the call, a function that sends a line, and an event that is set when the caller cancels or leaves."""


class NotRunning(Exception):
    """Nobody listens at the socket; the message says what to do."""


class Refused(Exception):
    """A call cannot be answered; the message says why."""


def socket_path(state_dir: Path, port: int) -> Path:
    """Return the socket of the `tandem up` whose gateway listens at `port`."""
    return state_dir / "up" / f"{port}.sock"


@asynccontextmanager
async def listening(path: Path, call: Call) -> AsyncIterator[None]:
    """Answer calls at `path` inside the block. Raise OSError if the socket cannot be made."""
    callers: set[asyncio.Task[None]] = set()

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        callers.add(task)
        try:
            await _answer(reader, writer, call, is_full=len(callers) > _MAX_CALLERS)
        finally:
            callers.discard(task)
            writer.close()

    listener = _bound(path)
    server = await asyncio.start_unix_server(on_connect, sock=listener, limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for caller in tuple(callers):
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bound(path: Path) -> socket.socket:
    """Return a socket with mode 0600 at `path`; replace that of a process that was killed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)  # no other process has this port
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _short(path) as address:
            listener.bind(address)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call, *, is_full: bool) -> None:
    def send(line: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(line).encode() + b"\n")

    left = asyncio.Event()
    watching: asyncio.Task[None] | None = None
    try:
        _check_peer(writer.get_extra_info("socket"))
        if is_full:
            raise Refused(f"{_MAX_CALLERS} commands talk to this `tandem up` already; end one")
        async with asyncio.timeout(_FIRST_LINE_SECONDS):
            request = _parse(await reader.readline())
        watching = asyncio.create_task(_watch(reader, left))
        await call(request, send, left)
    except Refused as error:
        send({"error": str(error)})
    except (TimeoutError, ValueError) as error:  # readline raises ValueError for a line that is too long
        send({"error": f"the call is no line of JSON: {error or 'it did not come in time'}"})
    finally:
        if watching is not None:
            watching.cancel()
    with contextlib.suppress(ConnectionError):  # the caller has left
        await writer.drain()


async def _watch(reader: asyncio.StreamReader, left: asyncio.Event) -> None:
    """Set the event once the caller cancels or leaves; any further line is a cancel."""
    with contextlib.suppress(ConnectionError, ValueError):
        await reader.readline()
    left.set()


def _parse(line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    if not isinstance(request, dict):
        raise ValueError("not an object")
    return request


def _check_peer(connection: socket.socket) -> None:
    """Raise Refused if the caller is another user: not even root's calls are answered."""
    if sys.platform != "linux":  # the mode of the socket protects it
        return
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise Refused(f"this `tandem up` belongs to user {os.geteuid()}, and user {user} calls")


# ------------------------------------------------------------------------------------------------------------ callers


class Caller:
    """One call to a running `tandem up`. Blocks; a context manager."""

    def __init__(self, state_dir: Path, port: int) -> None:
        """Raise NotRunning if there is none, or it belongs to another user."""
        path = socket_path(state_dir, port)
        try:
            found = path.lstat()
        except OSError:
            raise NotRunning(_nobody(state_dir, port)) from None
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise NotRunning(f"{path} is no socket of user {os.geteuid()}; run the command as who runs `tandem up`")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(path) as address:
                self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise NotRunning(_nobody(state_dir, port)) from error
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # what was refused is still to be read
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the answer's lines. Raise Refused for a call that is refused."""
        while line := self._lines.readline(MAX_LINE_BYTES):
            answer = json.loads(line)
            if "error" in answer:
                raise Refused(str(answer["error"]))
            yield answer


def _nobody(state_dir: Path, port: int) -> str:
    others = ", ".join(sorted(path.stem for path in (state_dir / "up").glob("*.sock") if path.stem != str(port)))
    there = f"one runs at port {others} (--port)" if others else "start one with `tandem up`"
    return f"no `tandem up` runs at port {port} with the state directory {state_dir}; {there}"


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield an address of the path that is short enough for AF_UNIX."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES or sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
