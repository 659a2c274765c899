"""Reads the JSON object of one call while the model writes it."""

from __future__ import annotations

import json

_WHITESPACE = " \t\r\n"


class CallObject:
    """Reads {"name": "...", "arguments": {...}} in pieces. Other keys are skipped."""

    def __init__(self, arguments_key: str) -> None:
        self._arguments_key = arguments_key
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key = ""
        self._member: str | None = None
        """The key at depth 1 whose value is being read."""
        self._value: list[str] = []
        self.name: str | None = None
        self.is_complete = False

    def push(self, text: str) -> tuple[int, str]:
        """Read up to the object's end. Return the number of characters read, and the text added to the arguments."""
        added: list[str] = []
        for position, character in enumerate(text):
            if self._take(character):
                added.append(character)
            if self.is_complete:
                return position + 1, "".join(added)
        return len(text), "".join(added)

    def _take(self, character: str) -> bool:
        """Read one character. Return whether it belongs to the arguments."""
        if self._in_string:
            self._take_in_string(character)
            return self._keep(character)
        if self._depth == 1 and character in ",}":
            self._end_member()
            self.is_complete = character == "}"
            return False
        if self._depth == 1 and self._member is None:
            self._take_in_key(character)
            return False
        if character == '"':
            self._in_string = True
        self._depth += (character in "{[") - (character in "}]")
        return self._keep(character) if self._member is not None else False

    def _take_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False

    def _take_in_key(self, character: str) -> None:
        if character == ":":
            self._member, self._key = json.loads(self._key), ""
        elif character == '"' and not self._key:
            self._in_string, self._key = True, character

    def _keep(self, character: str) -> bool:
        """Add a character to the current key or value. Return whether it belongs to the arguments."""
        if self._member is None:
            self._key += character
            return False
        if not self._value and character in _WHITESPACE:
            return False
        self._value.append(character)
        return self._member == self._arguments_key

    def _end_member(self) -> None:
        if self._member == "name":
            self.name = str(json.loads("".join(self._value)))
        self._member, self._value = None, []
