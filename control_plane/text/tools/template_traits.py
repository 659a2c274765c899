"""Finds out how a chat template renders tools, calls and results.

A template does not declare this. So small chats with known names are rendered, and the output is searched for these
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from control_plane.text.template import ChatTemplate
from control_plane.text.tools.forms import GENERIC, ToolForm, form_written_in
from tandem_runtime.errors import InvalidRequest

_USER = {"role": "user", "content": "hello"}
_FUNCTION = {
    "name": "probe",
    "description": "Probes",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
_TOOL = {"type": "function", "function": _FUNCTION}
_ARGUMENTS = {"key": "value"}
_ARGUMENTS_TEXT = '{"key": "value"}'
_WRITTEN_ARGUMENTS = re.compile(r'\{\s*"key":\s*"value"\s*\}')
_SHORT_ID = "abcdef123"
_LONG_ID = "call_0123456789abcdef"


@dataclass(frozen=True)
class TemplateTraits:
    form: ToolForm
    """The form of calls; the generic form if the template does not render tools in a known form."""
    writes_calls: bool
    """Whether it renders an assistant's `tool_calls`; else calls are written into the content."""
    takes_argument_text: bool
    """Whether it takes a call's arguments as text instead of an object."""
    takes_several_calls: bool
    """Whether one message may have several calls."""
    needs_short_ids: bool
    """Whether ids of calls must have nine letters and digits (Mistral)."""
    takes_results: bool
    """Whether it renders the role `tool`."""
    takes_system: bool
    needs_description: bool
    """Whether it renders a tool only if the tool has a description (gpt-oss)."""

    @property
    def offers_tools(self) -> bool:
        return self.form is not GENERIC


def traits_of(source: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
    """Return the traits of a template; cached."""
    return _traits(source, tuple(sorted(special_tokens.items())))


@lru_cache(maxsize=256)
def _traits(source: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTraits:
    template = ChatTemplate(source, dict(special_tokens))
    offered = "probe" in _rendered(template, [_USER], tools=[_TOOL])
    bare = _TOOL | {"function": {name: value for name, value in _FUNCTION.items() if name != "description"}}
    call = _first_written(template)
    form = form_written_in(call.text) if offered else None
    return TemplateTraits(
        form=form or GENERIC,
        writes_calls=bool(call.text) and form is not None,
        takes_argument_text=call.arguments_are_text,
        takes_several_calls=form is None or bool(_call_text(template, call, num_calls=2)),
        needs_short_ids=bool(call.text) and not _call_text(template, call, call_id=_LONG_ID),
        takes_results="results" in _rendered(template, [*call.messages(), _result(_SHORT_ID)], tools=[_TOOL]),
        takes_system="briefly" in _rendered(template, [{"role": "system", "content": "briefly"}, _USER]),
        needs_description=offered and "probe" not in _rendered(template, [_USER], tools=[bare]),
    )


@dataclass(frozen=True)
class _Written:
    """How an assistant's call was rendered; `text` is "" if it was not."""

    text: str
    arguments_are_text: bool

    def messages(self, call_id: str = _SHORT_ID, num_calls: int = 1) -> list[dict[str, Any]]:
        if not self.text:
            return [_USER, {"role": "assistant", "content": "calling"}]
        arguments = _ARGUMENTS_TEXT if self.arguments_are_text else _ARGUMENTS
        call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        return [_USER, {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}]


def _first_written(template: ChatTemplate) -> _Written:
    for arguments_are_text in (False, True):
        tried = _Written("tried", arguments_are_text)
        text = _call_text(template, tried)
        if text:
            return _Written(text, arguments_are_text)
    return _Written("", False)


def _call_text(template: ChatTemplate, written: _Written, call_id: str = _SHORT_ID, num_calls: int = 1) -> str:
    """Return a rendered chat with calls; "" if the template refuses it or omits a call or its arguments."""
    chat = written.messages(call_id, num_calls)
    results = [_result(call_id)] * num_calls
    # Without tools, whose description could be mistaken for calls.
    for messages in (chat, [*chat, *results]):
        text = _rendered(template, messages)
        if "probe" in text and len(_WRITTEN_ARGUMENTS.findall(text)) == num_calls:
            return text
    return ""


def _result(call_id: str) -> Mapping[str, Any]:
    return {"role": "tool", "name": "probe", "tool_call_id": call_id, "content": "results"}


def _rendered(template: ChatTemplate, messages: list[Any], tools: list[Any] | None = None) -> str:
    """Return the prompt; "" if the template refuses the messages."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=False)
    except InvalidRequest:
        return ""
