"""How does a chat look?

On a terminal with colours that both dark and light ones show well; elsewhere nothing but the answers. What a model or
a server wrote is text and nothing else: neither rich's markup nor a terminal's escape sequences are in it once shown.
"""

from __future__ import annotations

from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

_SHOWN_AS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},  # ESC becomes ␛
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),  # U+009B begins a sequence as ESC [ does
    ord("\r"): "",
    ord("\n"): "\n",
    ord("\t"): "\t",
}


def visible(text: str) -> str:
    """Return `text` without power over a terminal: control characters but newline and tab are drawn, not sent."""
    return text.translate(_SHOWN_AS)


class View(Protocol):
    """Where a chat shows things."""

    def open(self, model: str, url: str) -> None:
        """Say who answers."""

    def wait(self) -> None:
        """Show that a question is on its way."""

    def piece(self, text: str) -> None:
        """Show the next piece of the answer."""

    def end_answer(self, facts: str) -> None:
        """End the answer's line; `facts` about it go below."""

    def break_line(self) -> None:
        """Leave the line at which the prompt stands."""

    def show(self, text: str) -> None:
        """Show what a command was asked for."""

    def note(self, text: str) -> None:
        """Confirm what a command did."""

    def error(self, message: str, remedy: str) -> None:
        """Say what went wrong, and what helps; `remedy` may be empty."""


class PlainView:
    """For pipes: answers on `out`, the rest on `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._last = "\n"

    def open(self, model: str, url: str) -> None:
        """A script knows."""

    def wait(self) -> None:
        """A script waits."""

    def piece(self, text: str) -> None:
        self._last = visible(text) or self._last
        self._out.write(visible(text))
        self._out.flush()

    def end_answer(self, facts: str) -> None:
        if not self._last.endswith("\n"):
            self._out.write("\n")
        self._out.flush()
        self._last = "\n"

    def break_line(self) -> None:
        """A pipe has no prompt."""

    def show(self, text: str) -> None:
        self._out.write(visible(text) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        self._err.write(visible(text) + "\n")

    def error(self, message: str, remedy: str) -> None:
        line = visible("; ".join(filter(None, ["tandem: " + message, remedy])))
        self._err.write(f"\033[31m{line}\033[0m\n" if self._err.isatty() else line + "\n")


class TerminalView:
    """For people: what is not the conversation is dim, errors are red."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._can_erase = console.color_system is not None and not console.is_dumb_terminal
        self._is_waiting = False
        self._last = "\n"

    def open(self, model: str, url: str) -> None:
        self._print(Text.assemble((visible(model), "bold"), (f" · {url} · /help, Ctrl-D leaves", "dim")))
        self._print(Text())

    def wait(self) -> None:
        if self._can_erase:
            self._write("\033[2m…\033[0m")
            self._is_waiting = True

    def piece(self, text: str) -> None:
        self._end_waiting()
        self._last = visible(text) or self._last
        self._write(visible(text))

    def end_answer(self, facts: str) -> None:
        self._end_waiting()
        if not self._last.endswith("\n"):
            self._write("\n")
        self._last = "\n"
        if facts:
            self.note(facts)

    def break_line(self) -> None:
        self._write("\n")

    def show(self, text: str) -> None:
        self._print(Text(visible(text) + "\n"))

    def note(self, text: str) -> None:
        self._print(Text(visible(text) + "\n", style="dim"))

    def error(self, message: str, remedy: str) -> None:
        self._print(Text(visible(message), style="red"))
        self._print(Text(visible(remedy) + "\n" if remedy else ""))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _end_waiting(self) -> None:
        if self._is_waiting:
            self._write("\r\033[K")
            self._is_waiting = False

    def _write(self, text: str) -> None:
        """Write as it is: rich would look at each piece for styles and widths, and a terminal wraps well by itself."""
        self._console.file.write(text)
        self._console.file.flush()
