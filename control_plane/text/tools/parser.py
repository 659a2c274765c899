"""Separates an answer into text and tool calls, while the answer arrives in pieces.

    text ... [opening] ... { call } ... { call } ...

Text after the opening that is not part of a call is dropped. The returned pieces, joined, do not depend on how the
text was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from control_plane.text.tool import CallDelta
from control_plane.text.tools.call_object import CallObject
from control_plane.text.tools.forms import ToolForm


class Parsed(NamedTuple):
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class CallParser:
    """Parses the answer of one choice."""

    def __init__(self, form: ToolForm, call_id: Callable[[int], str]) -> None:
        """`call_id` returns the id of a call by its index, always the same for the same answer."""
        self._form = form
        self._call_id = call_id
        self._held = ""
        self._is_text_only = False
        self._is_opened = False
        self._call: CallObject | None = None
        self._waiting = ""
        """Arguments of a call whose name is not known yet."""
        self._num_begun = 0
        self._num_complete = 0

    @property
    def has_complete_calls(self) -> bool:
        """Whether the answer has calls, and all are complete."""
        return 0 < self._num_begun == self._num_complete and self._call is None

    @property
    def has_incomplete_call(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._call is not None

    @property
    def is_within_call(self) -> bool:
        """Whether calls were opened, and the current or first call is not complete."""
        return self._is_opened and (self.has_incomplete_call or not self._num_begun)

    def push(self, text: str) -> Parsed:
        if self._is_text_only or not text:
            return Parsed(text)
        if self._is_opened:
            return Parsed(calls=tuple(self._calls(text)))
        self._held += text
        return self._look_for_opening()

    def flush(self) -> Parsed:
        """Return the held text at the end of the answer: it was not an opening."""
        text, self._held = self._held, ""
        return Parsed(text)

    def _look_for_opening(self) -> Parsed:
        found = self._first_opening()
        if found is not None:
            start, opening = found
            text = self._held[:start].rstrip()
            rest = self._held[start:] if opening == "{" else self._held[start + len(opening) :]
            self._is_opened, self._held = True, ""
            return Parsed(text, tuple(self._calls(rest)))
        num_open = self._num_that_may_open()
        text, self._held = self._held[: len(self._held) - num_open], self._held[len(self._held) - num_open :]
        self._is_text_only = self._form.begins_answer and not self._held
        return Parsed(text)

    def _first_opening(self) -> tuple[int, str] | None:
        if self._form.begins_answer:
            return next(((0, each) for each in self._form.openings if self._held.startswith(each)), None)
        found = [(start, each) for each in self._form.openings if (start := self._held.find(each)) >= 0]
        return min(found, default=None)

    def _num_that_may_open(self) -> int:
        """Return the length of the held text's end that may be an opening, or the whitespace before an opening."""
        held, openings = self._held, self._form.openings
        if self._form.begins_answer:
            return len(held) if any(each.startswith(held) for each in openings) else 0
        longest = min(len(held), max(map(len, openings)) - 1)
        ends = (n for n in range(longest, 0, -1) if any(each.startswith(held[-n:]) for each in openings))
        return len(held) - len(held[: len(held) - next(ends, 0)].rstrip())

    def _calls(self, text: str) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while text:
            if self._call is None:
                start = text.find("{")
                if start < 0:
                    break
                text, self._call, self._waiting = text[start:], CallObject(self._form.arguments_key), ""
            num_taken, arguments = self._call.push(text)
            text = text[num_taken:]
            deltas += self._deltas(self._call, arguments)
        return deltas

    def _deltas(self, call: CallObject, arguments: str) -> list[CallDelta]:
        """Return the deltas of a call for newly read arguments."""
        self._waiting += arguments
        if call.name is None:
            self._call = None if call.is_complete else call
            return []
        deltas = []
        if self._num_begun == self._num_complete:
            deltas.append(CallDelta(self._num_begun, self._call_id(self._num_begun), call.name))
            self._num_begun += 1
        index = self._num_begun - 1
        if self._waiting or call.is_complete:
            deltas.append(CallDelta(index, self._call_id(index), None, self._waiting, is_last=call.is_complete))
        self._waiting = ""
        if call.is_complete:
            self._num_complete += 1
            self._call = None
        return deltas
