"""Writes the grammar of answers of a model with tools: text, calls in the family's form, or both.

The grammar holds arguments to each tool's schema. Unless a call is required, an answer is text that does not look like
a call, or calls, preceded by text if the form allows that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.text.tools.forms import OFTEN_ABSENT, ToolForm
from tandem_engine.grammar import Grammar
from tandem_engine.scheduling.grammar_source import nested_json
from tandem_runtime.errors import InvalidRequest

ArgumentSchemas = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of tools, with the schemas of their arguments."""
_ANY = "/(?s:.*)/"


def call_grammar(
    form: ToolForm,
    tools: ArgumentSchemas,
    control_ids: Mapping[str, int],
    *,
    must_call: bool = False,
    at_most_one: bool = False,
    text: Mapping[str, Any] | None = None,
) -> Grammar:
    """Return the grammar of an answer. Raise InvalidRequest if it is too long.

    `control_ids` are the parts of the form that are tokens of their own. `text` is the JSON Schema of an answer without
    calls.
    """
    lark = _LarkForm(form, control_ids)
    if must_call:
        rules = ["start: calls"]
    elif text is not None:
        rules = ["start: text | calls", f"text: {nested_json(text)}"]
    else:
        rules = lark.free_text()
    rules += [f"calls: {lark.firsts()} list", lark.list_of_calls(at_most_one=at_most_one)]
    rules += lark.calls(tools)
    try:
        return Grammar("lark", "\n".join(rules))
    except ValueError as error:
        raise InvalidRequest(
            f"the names and schemas of all tools together are too long: {error}; send fewer or smaller tools",
            field="tools",
        ) from error


class _LarkForm:
    """The Lark rules of one form, for one vocabulary."""

    def __init__(self, form: ToolForm, control_ids: Mapping[str, int]) -> None:
        self._form = form
        self._control_ids = control_ids

    def free_text(self) -> list[str]:
        """Return the rules of an answer of text, or of text followed by calls, separated at the first opening."""
        form = self._form
        openings = [each for each in form.openings if each not in self._control_ids and each not in OFTEN_ABSENT]
        if not openings:  # a token of its own is never part of text
            return ["start: TEXT calls?", f"TEXT: {_ANY}"]
        unlike = "|".join(map(re.escape, openings))
        if form.begins_answer:
            return ["start: TEXT | calls", f"TEXT: {_ANY} & ~/({unlike})(?s:.*)/"]
        (opening,) = openings
        rests = [first.removeprefix(opening) for first in form.firsts]
        return [
            f"start: TEXT | head {self._one_of(rests)} list",
            f"TEXT: {_ANY} & ~/(?s:.*){unlike}(?s:.*)/",
            f"ANY: {_ANY}",
            f"head[lazy]: ANY {json.dumps(opening)}",  # lazy: ends at the first opening
        ]

    def firsts(self) -> str:
        return self._one_of(
            [each for each in self._form.firsts if each not in OFTEN_ABSENT or each in self._control_ids]
        )

    def list_of_calls(self, *, at_most_one: bool) -> str:
        more = "" if at_most_one else f"({self._literal(self._form.between)} call)*"
        return f"list: call {more} {self._literal(self._form.last)}"

    def calls(self, tools: ArgumentSchemas) -> list[str]:
        names = [f"call_{index}" for index in range(len(tools))]
        return [f"call: {' | '.join(names)}"] + [
            f"{rule}: {json.dumps(self._before_arguments(name))} {nested_json(schema)} " + r'"}"'
            for rule, (name, schema) in zip(names, tools, strict=True)
        ]

    def _before_arguments(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self._form.arguments_key}": '

    def _one_of(self, texts: Sequence[str]) -> str:
        written = [self._literal(text) for text in texts if text]
        return f"({' | '.join(written)}){'?' if '' in texts else ''}" if written else ""

    def _literal(self, text: str) -> str:
        return literal(text, self._control_ids)


def literal(text: str, control_ids: Mapping[str, int]) -> str:
    """Return a text as Lark literals; names of control tokens become those tokens."""
    parts: list[str] = []
    end = 0
    for match in re.finditer("|".join(map(re.escape, control_ids)) or "(?!)", text):
        parts += [json.dumps(text[end : match.start()]), f"<[{control_ids[match[0]]}]>"]
        end = match.end()
    parts.append(json.dumps(text[end:]))
    return " ".join(part for part in parts if part != '""')
