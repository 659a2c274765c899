"""Where are the messages of earlier chats, for the arrow keys?

One message per entry in a file that only its owner can read; a line that ends with a backslash goes on in the next,
as it does at the prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MAX_MESSAGES = 1000


def history_path() -> Path:
    """Return where the file is, by the XDG Base Directory Specification, which ignores relative paths."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tandem" / "chat_history"


class History:
    """The file. Where it cannot be read or written, that is said once and the chat goes on without."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._is_kept = True

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
        """Keep a message; two chats at once both keep theirs."""
        if self._is_kept:
            try:
                _append(self._path, _entry(message))
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_kept = False
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
