"""How does a chat read what the user types?

At a terminal with GNU readline (or libedit, where Python was built with that): arrows, history, completion of commands
and models with Tab. From a pipe line by line.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from tandem_client.cli.chat_history import History

_ESCAPE_SEQUENCES = re.compile(r"(?:\033\[[0-9;]*m)+")


class Lines(Protocol):
    """Where messages come from."""

    def next_message(self) -> str:
        """Return the next message; raises EOFError where there is none any more."""


class PlainLines:
    """A pipe: no prompt, no history."""

    def __init__(self, source: TextIO) -> None:
        self._source = source

    def next_message(self) -> str:
        return _gather(self._read_line)

    def _read_line(self, goes_on: bool) -> str:
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TerminalLines:
    """A terminal, with a prompt and the messages of earlier chats."""

    def __init__(self, console: Console, history: History, completions: Callable[[str], Sequence[str]]) -> None:
        """`completions` returns what the last word of the line typed so far could become."""
        marks = ("› ", "… ") if console.encoding.lower().startswith("utf") else ("> ", ". ")
        self._prompts = [_prompt(console, mark) for mark in marks]
        has_readline = importlib.util.find_spec("readline") is not None  # Windows has none
        self._remember = _with_readline(history, completions) if has_readline else history.append

    def next_message(self) -> str:
        message = _gather(self._read_line)
        if message.strip():
            self._remember(message)
        return message

    def _read_line(self, goes_on: bool) -> str:
        return input(self._prompts[goes_on]).rstrip("\n")  # what is pasted may end with some


def _gather(read_line: Callable[[bool], str]) -> str:
    """Read one message: a line that ends with a backslash goes on in the next; the end of the input ends it too."""
    lines = [read_line(False)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(True))
        except EOFError:
            break
    return "\n".join(lines)


def _prompt(console: Console, mark: str) -> str:
    """Return the prompt with its colours between the marks that tell readline that they have no width."""
    with console.capture() as captured:
        console.print(Text(mark, style="bold magenta"), end="")
    return _ESCAPE_SEQUENCES.sub(r"\001\g<0>\002", captured.get())


def _with_readline(history: History, completions: Callable[[str], Sequence[str]]) -> Callable[[str], None]:
    """Set readline up; return what keeps a message, for the arrow keys and for later chats."""
    import readline

    def complete(word: str, index: int) -> str | None:
        return dict(enumerate(completions(readline.get_line_buffer()))).get(index)

    def remember(message: str) -> None:
        num_kept = readline.get_current_history_length()
        if not num_kept or readline.get_history_item(num_kept) != message:
            readline.add_history(message)
            history.append(message)

    readline.set_auto_history(False)  # it would take the lines of one message for several
    for message in history.load():
        readline.add_history(message)
    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # lines pasted together are one message
    return remember
