"""Decodes server-sent events.

Follows the WHATWG HTML standard, section 9.2.6, "Interpreting an event stream". Lines end only with CRLF, LF or CR.
httpx's `iter_lines` also splits at U+2028, U+0085 and form feeds, which may be part of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventDecoder:
    """Turns chunks of bytes into the data of each event. A chunk may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of every event that `chunk` completes; skip events with empty data."""
        for line in self._lines(chunk):
            if line:
                self._field(line)
            elif self._data:
                data, self._data = "\n".join(self._data), []
                yield data

    def _lines(self, chunk: bytes) -> Iterator[str]:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")  # the second half of a CRLF, split between two chunks
            self._after_cr = False
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if self._at_start:
                line, self._at_start = line.removeprefix(_BOM), False
            yield line.decode("utf-8", errors="replace")

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")  # a comment is a line whose name is empty
        if name == "data":
            self._data.append(value.removeprefix(" "))
