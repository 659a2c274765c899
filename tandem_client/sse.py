"""How do bytes become server-sent events?

As the WHATWG HTML standard says (section 9.2.6, "Interpreting an event stream"). Lines end with CRLF, LF or CR and
nothing else: httpx's own `iter_lines` also splits at U+2028, U+0085 and form feeds, which may stand inside a token.
"""

from __future__ import annotations

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventDecoder:
    """Turns chunks of bytes, cut anywhere, into the data of each event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of every event that `chunk` completes; an event whose data is empty is none."""
        for line in self._lines(chunk):
            if line:
                self._field(line)
            elif self._data:
                data, self._data = "\n".join(self._data), []
                yield data

    def _lines(self, chunk: bytes) -> Iterator[str]:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")  # the second half of a CRLF that was cut in two
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
