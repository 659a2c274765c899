"""What of workerd's stderr is for the author of the Worker, and how does it read?

workerd runs with --verbose, the only way to learn the line of an error; what it says of itself is left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator

_OWN = re.compile(r"^\S+?\.\w+(?:\+\+)?:\d+: (info|warning|error): (.*)")
_STACK = re.compile(r"uncaught exception; source = .*?; stack = (.*)")
_UNCAUGHT = re.compile(r"^Uncaught exception: (?:\S+:\d+: )?(?:\w+: )?(?:remote\.)?(?:jsg(?:-internal)?\.)?(.*)")
_AT_START = re.compile(r"^service [\w-]+: (?:Uncaught )?(.*)")


class ErrorLines:
    """Sorts the lines of one workerd."""

    def __init__(self) -> None:
        self._last = ""

    def shown(self, line: str) -> Iterator[str]:
        """Yield what to show of a line: nothing, or one line."""
        own = _OWN.match(line)
        if own is None:
            if not line.startswith("stack: /"):
                yield started[1] if (started := _AT_START.match(line)) else line
        elif stack := _STACK.match(own[2]):
            self._last = stack[1]
            yield stack[1]
        elif own[1] != "info":
            uncaught = _UNCAUGHT.match(own[2])
            text = uncaught[1] if uncaught else own[2]
            if text != self._last:  # told with its stack already
                yield text
            self._last = ""


class Pump:
    """Reads a stderr to its end: keeps what comes before `release`, and passes on the rest at once."""

    def __init__(
        self, stderr: asyncio.StreamReader, write: Callable[[str], None], located: Callable[[str], str]
    ) -> None:
        """`located` gives a line with the places in it as the Worker's author knows them."""
        self._lines = ErrorLines()
        self._write = write
        self._located = located
        self._held: list[str] | None = []
        self._task = asyncio.create_task(self._run(stderr))

    def release(self) -> None:
        """Write what was kept, and from now on what comes."""
        held, self._held = self._held, None
        for line in held or ():
            self._write(line)

    async def all(self) -> str:
        """Wait for the end, and return what was kept."""
        await self._task
        return "\n".join(self._held or ())

    async def _run(self, stderr: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stderr.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        for text in self._lines.shown(line.decode("utf-8", errors="replace")):
            shown = self._located(text)
            if self._held is None:
                self._write(shown)
            else:
                self._held.append(shown)
