"""Which answers may a model give that is offered tools: text, calls in its family's form, or either?

Arguments are held to each tool's schema. Without a duty to call, an answer is text that does not look like a call, or
calls, behind as much text as the form has before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.text.tools.forms import OFTEN_ABSENT, ToolForm
from tandem_engine.scheduling.grammar import Grammar
from tandem_engine.scheduling.grammar_source import nested_json
from tandem_runtime.errors import InvalidRequest

ArgumentSchemas = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of tools, and the schemas of their arguments."""
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
    """Return the grammar of an answer; raises InvalidRequest if it is too long.

    `control_ids`: the form's control tokens. `text`: the JSON Schema of an answer without calls.
    """
    written = _Writing(form, control_ids)
    if must_call:
        rules = ["start: calls"]
    elif text is not None:
        rules = ["start: text | calls", f"text: {nested_json(text)}"]
    else:
        rules = written.free_text()
    rules += [f"calls: {written.firsts()} list", written.list_of_calls(at_most_one=at_most_one)]
    rules += written.calls(tools)
    try:
        return Grammar("lark", "\n".join(rules))
    except ValueError as error:
        raise InvalidRequest(
            f"the tools' names and schemas are too long together: {error}; send fewer or smaller tools", field="tools"
        ) from error


class _Writing:
    """One form in Lark, for one vocabulary."""

    def __init__(self, form: ToolForm, control_ids: Mapping[str, int]) -> None:
        self._form = form
        self._control_ids = control_ids
        self._parts = re.compile("|".join(map(re.escape, control_ids)) or "(?!)")

    def free_text(self) -> list[str]:
        """Return the rules of an answer of text, or of text and calls behind it, told apart by the first opening."""
        form = self._form
        openings = [each for each in form.openings if each not in self._control_ids and each not in OFTEN_ABSENT]
        if not openings:  # a control token is never text
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
            f"head[lazy]: ANY {json.dumps(opening)}",  # lazy: it ends with the first opening
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
        """Write a text in which names of control tokens are those tokens."""
        parts: list[str] = []
        end = 0
        for match in self._parts.finditer(text):
            parts += [json.dumps(text[end : match.start()]), f"<[{self._control_ids[match[0]]}]>"]
            end = match.end()
        parts.append(json.dumps(text[end:]))
        return " ".join(part for part in parts if part != '""')
