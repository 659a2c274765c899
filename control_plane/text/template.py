"""Renders chat messages as the text that a model was trained on.

Chat templates come with checkpoints and are untrusted code. They render in jinja2's sandbox, on plain JSON values only.
The result equals that of `transformers.apply_chat_template` (same environment: trimmed blocks, loop controls, the
`generation` tag, `tojson` without escapes, `raise_exception`, `strftime_now`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem_runtime.errors import InternalError, InvalidRequest

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A compiled chat template and the special tokens that it may use by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. Raise InternalError if it is not valid jinja: the model is at fault, not the caller."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. Raise InvalidRequest with the template's own message if it refuses the messages."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | dict(variables or {})),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error


@lru_cache(maxsize=256)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InternalError(f"the model's chat template is not valid jinja (line {error.lineno}): {error}") from error


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. For serving, its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
