"""The terminal of `tandem chat`: reads messages, shows answers, keeps the history of messages.

On a terminal, answers come with colours for dark and light backgrounds, and GNU readline (or libedit) gives arrow keys,
history and completion. In a pipe, each line is a message and only answers are printed. Text of a model or a server
reaches the terminal without rich's markup and without escape sequences.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from tandem_machine.folders import home_folder

_SHOWN_AS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20)},  # ESC becomes ␛
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),  # U+009B begins a sequence as ESC [ does
    ord("\r"): "",
    ord("\n"): "\n",
    ord("\t"): "\t",
}


def visible(text: str) -> str:
    """Replace control characters, except newline and tab, by visible symbols."""
    return text.translate(_SHOWN_AS)


class View(Protocol):
    """The output of a chat."""

    def open(self, model: str, url: str) -> None:
        """Show the model and the address."""

    def wait(self) -> None:
        """Show that a question was sent."""

    def thinking(self, text: str) -> None:
        """Show the next piece of the thinking before the answer."""

    def piece(self, text: str) -> None:
        """Show the next piece of the answer."""

    def end_answer(self, facts: str) -> None:
        """End the answer's line, and show `facts` below."""

    def break_line(self) -> None:
        """Leave the line of the prompt."""

    def show(self, text: str) -> None:
        """Show the output of a command."""

    def note(self, text: str) -> None:
        """Confirm a command."""

    def error(self, message: str, remedy: str) -> None:
        """Show an error and its remedy, which may be empty."""


class PlainView:
    """For pipes: answers go to `out`, everything else to `err`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._last = "\n"

    def open(self, model: str, url: str) -> None:
        """Print nothing in a pipe."""

    def wait(self) -> None:
        """Print nothing in a pipe."""

    def thinking(self, text: str) -> None:
        """Print nothing: a pipe gets answers only."""

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
        """Print nothing in a pipe, which has no prompt."""

    def show(self, text: str) -> None:
        self._out.write(visible(text) + "\n")
        self._out.flush()

    def note(self, text: str) -> None:
        self._err.write(visible(text) + "\n")

    def error(self, message: str, remedy: str) -> None:
        line = visible("; ".join(filter(None, ["tandem: " + message, remedy])))
        self._err.write(f"\033[31m{line}\033[0m\n" if self._err.isatty() else line + "\n")


class TerminalView:
    """For terminals: text outside the conversation is dim, errors are red."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._can_erase = console.color_system is not None and not console.is_dumb_terminal
        self._is_waiting = False
        self._is_thinking = False
        """What was shown last is thinking: a blank line separates the answer."""
        self._last = "\n"

    def open(self, model: str, url: str) -> None:
        self._print(Text.assemble((visible(model), "bold"), (f" · {url} · /help, Ctrl-D leaves", "dim")))
        self._print(Text())

    def wait(self) -> None:
        if self._can_erase:
            self._write("\033[2m…\033[0m")
            self._is_waiting = True

    def thinking(self, text: str) -> None:
        self._end_waiting()
        self._is_thinking = True
        self._last = visible(text) or self._last
        self._write(f"\033[2m{visible(text)}\033[0m" if self._can_erase else visible(text))

    def piece(self, text: str) -> None:
        self._end_waiting()
        if self._is_thinking and text:
            self._is_thinking = False
            self._write("\n" if self._last.endswith("\n") else "\n\n")
        self._last = visible(text) or self._last
        self._write(visible(text))

    def end_answer(self, facts: str) -> None:
        self._end_waiting()
        if not self._last.endswith("\n"):
            self._write("\n")
        self._last = "\n"
        self._is_thinking = False
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
        """Write text directly; rich would search each piece for styles and widths."""
        self._console.file.write(text)
        self._console.file.flush()


_ESCAPE_SEQUENCES = re.compile(r"(?:\033\[[0-9;]*m)+")


class Lines(Protocol):
    """The source of messages."""

    def next_message(self) -> str:
        """Return the next message; raises EOFError at the end."""


class PlainLines:
    """A pipe: no prompt, no history."""

    def __init__(self, source: TextIO) -> None:
        self._source = source

    def next_message(self) -> str:
        return _gather(self._read_line)

    def _read_line(self, is_continuation: bool) -> str:
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TerminalLines:
    """A terminal, with a prompt and the messages of earlier chats."""

    def __init__(self, console: Console, history: History, completions: Callable[[str], Sequence[str]]) -> None:
        """`completions` returns the completions of the last word of the line."""
        marks = ("› ", "… ") if console.encoding.lower().startswith("utf") else ("> ", ". ")
        self._prompts = [_prompt(console, mark) for mark in marks]
        has_readline = importlib.util.find_spec("readline") is not None  # Windows has none
        self._remember = _with_readline(history, completions) if has_readline else history.append

    def next_message(self) -> str:
        message = _gather(self._read_line)
        if message.strip():
            self._remember(message)
        return message

    def _read_line(self, is_continuation: bool) -> str:
        return input(self._prompts[is_continuation]).rstrip("\n")  # pasted text may end with newlines


def _gather(read_line: Callable[[bool], str]) -> str:
    """Read one message. A line that ends with a backslash continues on the next line."""
    lines = [read_line(False)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(True))
        except EOFError:
            break
    return "\n".join(lines)


def _prompt(console: Console, mark: str) -> str:
    """Return the prompt; marks around its colours tell readline that they have no width."""
    with console.capture() as captured:
        console.print(Text(mark, style="bold magenta"), end="")
    return _ESCAPE_SEQUENCES.sub(r"\001\g<0>\002", captured.get())


def _with_readline(history: History, completions: Callable[[str], Sequence[str]]) -> Callable[[str], None]:
    """Set up readline; return a function that stores a message for the arrow keys and for later chats."""
    import readline

    def complete(word: str, index: int) -> str | None:
        return dict(enumerate(completions(readline.get_line_buffer()))).get(index)

    def remember(message: str) -> None:
        num_kept = readline.get_current_history_length()
        if not num_kept or readline.get_history_item(num_kept) != message:
            readline.add_history(message)
            history.append(message)

    readline.set_auto_history(False)  # it would store each line of a message separately
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


MAX_MESSAGES = 1000


def history_path() -> Path:
    """Return the path of the history file (XDG Base Directory Specification; relative paths are ignored)."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = home_folder() or Path("/")  # without a home it cannot be written, which `History` tells
    return (state if state.is_absolute() else home / ".local" / "state") / "tandem" / "chat_history"


class History:
    """The history file. If it cannot be read or written, the user is warned once, and the chat continues without it."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._is_usable = True

    def load(self) -> list[str]:
        """Return the last MAX_MESSAGES messages, oldest first, and cut the file to them."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _append(self._path, "")
            messages = _messages(self._path.read_text(encoding="utf-8", errors="replace"))
            if len(messages) > MAX_MESSAGES:
                _replace(self._path, messages[-MAX_MESSAGES:])
            return messages[-MAX_MESSAGES:]
        except OSError as error:
            self._give_up(error)
            return []

    def append(self, message: str) -> None:
        """Append a message. Two chats may append at the same time."""
        if self._is_usable:
            try:
                _append(self._path, _entry(message))
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        self._warn(f"messages are not kept for later chats: {error}")


def _entry(message: str) -> str:
    return message.replace("\n", "\\\n") + "\n"


def _messages(text: str) -> list[str]:
    messages: list[str] = []
    lines: list[str] = []
    for line in text.split("\n")[:-1]:
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            messages.append("\n".join(lines))
            lines.clear()
    return messages


def _replace(path: Path, messages: list[str]) -> None:
    shorter = path.with_name(f"{path.name}.{os.getpid()}")
    _append(shorter, "".join(map(_entry, messages)))
    shorter.replace(path)


def _append(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        path.chmod(0o600)
        file.write(text)
