"""Prepares messages with tools, calls and results for a chat template; what the template lacks becomes text.

Input messages have one format: `tool_calls` is a list of {"name", "arguments": object} with an optional "id", and the
results of tools have an optional "name" and an optional "tool_call_id".
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from control_plane.text.tool import Tool
from control_plane.text.tools.template_traits import TemplateTraits

Message = Mapping[str, Any]
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SHORT_ID_LENGTH = 9
_OPENING = "You can call these tools, each described by its name and a JSON Schema of its arguments:"
_CLOSING = (
    "To call tools, answer with nothing but a JSON object of this form: "
    '{"tool_calls": [{"name": "the name of a tool", "arguments": {"an argument": "its value"}}]}\n'
    "Where no tool helps, answer as you would without them."
)


def messages_for(traits: TemplateTraits, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages for a template. `tools` are those that the template does not render itself."""
    paired = list(_paired(messages))
    rendered = [_rendered(traits, message) for message in paired]
    if not traits.takes_results:
        rendered = list(_results_as_user_messages(rendered))
    return _with_system_text(traits, rendered, _description_of(tools)) if tools else rendered


def _paired(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the messages with an id for every call, and with id and name for every result of a call."""
    open_calls = _OpenCalls()
    num_calls = 0
    for message in messages:
        paired = dict(message)
        if message.get("tool_calls"):
            calls = [{"id": f"call_{num_calls + at}", **call} for at, call in enumerate(message["tool_calls"])]
            num_calls += len(calls)
            paired["tool_calls"] = calls
            open_calls.add(calls)
        elif message["role"] == "tool":
            call = open_calls.take(message.get("tool_call_id"), message.get("name"))
            if call is not None:
                paired |= {"name": call["name"], "tool_call_id": call["id"]}
        yield paired


class _OpenCalls:
    """Calls without a result, in order. Each call is looked at once per index, however many calls a chat has."""

    def __init__(self) -> None:
        self._all: deque[_OpenCall] = deque()
        self._by_id: defaultdict[str, deque[_OpenCall]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[_OpenCall]] = defaultdict(deque)

    def add(self, calls: Sequence[dict[str, Any]]) -> None:
        for call in calls:
            opened = _OpenCall(call)
            self._all.append(opened)
            self._by_id[call["id"]].append(opened)
            self._by_name[call["name"]].append(opened)

    def take(self, call_id: str | None, name: str | None) -> dict[str, Any] | None:
        """Remove and return the call that a result answers: by id, else by name, else the first; None for none."""
        of_name = self._all if name is None else self._by_name.get(name)
        candidates = self._by_id.get(call_id) if call_id else of_name
        while candidates:
            opened = candidates.popleft()
            if opened.is_open:  # else another index has found it
                opened.is_open = False
                return opened.call
        return None


@dataclass
class _OpenCall:
    call: dict[str, Any]
    is_open: bool = True


def _rendered(traits: TemplateTraits, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_calls") and traits.writes_calls:
        calls = [_for_template(traits, call) for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message.get("tool_calls"):
        calls = [{"name": call["name"], "arguments": call["arguments"]} for call in message["tool_calls"]]
        text = json.dumps({"tool_calls": calls}, ensure_ascii=False)
        return {"role": "assistant", "content": f"{message['content']}\n{text}" if message["content"] else text}
    if message.get("tool_call_id"):
        return {**message, "tool_call_id": _call_id(traits, message["tool_call_id"])}
    return message


def _results_as_user_messages(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield results as user messages; consecutive results become one message, since roles must alternate."""
    texts: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            of = f" of {message['name']}" if message.get("name") else ""
            texts.append(f"The result{of}: {message['content']}")
        elif message["role"] == "user" and texts:
            texts.append(message["content"])
        else:
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
            texts = []
            yield message
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _for_template(traits: TemplateTraits, call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    if traits.takes_argument_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": _call_id(traits, call["id"]), "type": "function", "function": function}


def _call_id(traits: TemplateTraits, call_id: str) -> str:
    """Return the id, or its replacement of nine letters and digits if the template needs short ids."""
    if not traits.needs_short_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum()):
        return call_id
    digest = blake2b(call_id.encode(errors="replace"), digest_size=_SHORT_ID_LENGTH).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def _description_of(tools: Sequence[Tool]) -> str:
    described = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join([_OPENING, *described, _CLOSING])


def _with_system_text(traits: TemplateTraits, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append a text to the system message, or prepend it to the first user message without a system role."""
    if not traits.takes_system:
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            return [{"role": "user", "content": text}, *messages]
        first = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
        return [*messages[:at], first, *messages[at + 1 :]]
    if messages and messages[0]["role"] == "system":
        content = messages[0]["content"]
        return [{**messages[0], "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
