"""The marks of gpt-oss's format (harmony), and the grammar of its answers with tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_plane.text.tools.call_grammar import ArgumentSchemas, literal
from tandem_engine.grammar import Grammar
from tandem_engine.scheduling.grammar_source import nested_json
from tandem_runtime.errors import InvalidRequest

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
"""Between two messages of an answer."""
_ANY = "/(?s:.*)/"


def harmony_grammar(
    tools: ArgumentSchemas, control_ids: Mapping[str, int], *, must_call: bool, text: Mapping[str, Any] | None
) -> Grammar:
    """Return the grammar of an answer with its thinking. Raise InvalidRequest if it is too long.

    `text` is the JSON Schema of an answer without calls. Then no text comes before: the answer would not be JSON.
    """
    channels = ("analysis", "commentary") if text is None else ("analysis",)
    before = [literal(f"<|channel|>{channel}<|message|>", control_ids) for channel in channels]
    rules = [
        f"start: before* {'call' if must_call else '(final | call)'}",
        f"before: ({' | '.join(before)}) TEXT {literal(NEXT, control_ids)}",
        f"final: {literal(FINAL, control_ids)} {'TEXT' if text is None else nested_json(text)}",
        f"TEXT: {_ANY}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    for index, (name, schema) in enumerate(tools):
        heads = (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            f" to=functions.{name}<|channel|>commentary json<|message|>",
        )
        either = " | ".join(literal(head, control_ids) for head in heads)
        rules.append(f"call_{index}: ({either}) {nested_json(schema)}")
    try:
        return Grammar("lark", "\n".join(rules))
    except ValueError as error:
        raise InvalidRequest(
            f"the names and schemas of all tools together are too long: {error}; send fewer or smaller tools",
            field="tools",
        ) from error
