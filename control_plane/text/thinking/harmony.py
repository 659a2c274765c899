"""The format of gpt-oss (harmony): an answer is messages in channels.

    header <|message|> text <|end|> <|start|>assistant header <|message|> text ...
    header = [" to=functions.NAME"] <|channel|> analysis | commentary | final [" to=functions.NAME"] [kind of content]

`analysis` is the thinking, `final` the answer, `commentary` a text before calls; a message to a function is a call. The
names of the marks are control tokens of the vocabulary, which the detokenizer returns by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.text.thinking.splitter import Split, num_that_may_begin
from control_plane.text.tools.forms import HARMONY
from control_plane.text.tools.harmony import MARKS

STOPS = ("<|return|>", "<|call|>")
"""Behind these the turn is over."""
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_MESSAGE = "<|message|>"
_BEGINNINGS = ("<|start|>", "<|channel|>", "to=", "assistant")
"""Of a header."""
_TO = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonySplitter:
    """Splits the text of one choice; see `ThinkingSplitter`. Calls are returned in the form HARMONY."""

    is_over = False
    """Never: a mark behind the answer would else be part of it."""

    def __init__(self, *, takes_calls: bool) -> None:
        self._takes_calls = takes_calls
        self._held = ""
        self._kind = "header"
        self._has_text = False
        """Whether text of the thinking was returned."""
        self._separator = ""
        """Between two messages of the thinking."""
        self.has_thought = False

    @property
    def is_thinking(self) -> bool:
        return self._kind in ("header", "analysis")

    def push(self, text: str) -> Split:
        self._held += text
        thinking, answer = [], []
        while True:
            split, goes_on = self._header() if self._kind == "header" else self._body()
            thinking.append(split.thinking)
            answer.append(split.answer)
            if not goes_on:
                return Split("".join(thinking), "".join(answer))

    def flush(self) -> Split:
        """Return the held text at the end of the answer: it was no mark. The arguments of a call end here, too."""
        held, self._held = self._held, ""
        if self._kind == "header":
            return Split() if _is_header(held) else Split(answer=held)
        return self._text(held, ends=True)

    def _header(self) -> tuple[Split, bool]:
        header, mark, behind = self._held.partition(_MESSAGE)
        if not mark:
            if _may_be_header(header):
                return Split(), False
            self._kind = "final"  # the model does not keep to its format: what it writes is the answer
            return Split(), True
        self._held, self._kind = behind, "final"
        channel, function = _CHANNEL.search(header), _TO.search(header)
        if function is not None:
            self._kind = "call" if self._takes_calls else "dropped"
            begun = f'{HARMONY.openings[0]}{{"name": {json.dumps(function[1])}, "arguments": '
            return Split(answer=begun if self._takes_calls else ""), True
        if channel is not None and channel[1] == "analysis":
            self._kind, self.has_thought = "analysis", True
        return Split(), True

    def _body(self) -> tuple[Split, bool]:
        found = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            split = self._text(text, ends=True)
            self._kind = "header"
            return split, True
        num_open = max(num_that_may_begin(self._held, mark) for mark in _ENDS)
        certain = len(self._held) - num_open
        text, self._held = self._held[:certain], self._held[certain:]
        return self._text(text), False

    def _text(self, text: str, *, ends: bool = False) -> Split:
        if self._kind == "dropped":
            return Split()
        if self._kind == "call":
            return Split(answer=text + "}" if ends else text)
        if self._kind != "analysis":
            return Split(answer=text)
        if text:
            self._has_text, text, self._separator = True, self._separator + text, ""
        if ends and self._has_text:
            self._separator = "\n"
        return Split(text)


def _is_header(text: str) -> bool:
    """Return whether a text begins as headers do."""
    return text.lstrip().startswith(_BEGINNINGS)


def _may_be_header(text: str) -> bool:
    first = text.lstrip()
    return first.startswith(_BEGINNINGS) or any(each.startswith(first) for each in _BEGINNINGS)


def mark_ids(text: str, control_ids: Mapping[str, int], encode: Any) -> Sequence[int]:
    """Return the ids of a text of marks and words, as the model writes it."""
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    return [id for part in parts if part for id in ([control_ids[part]] if part in control_ids else encode(part))]
