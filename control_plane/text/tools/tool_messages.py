"""How do tools, calls and their results reach a model, by its own chat template or, where that cannot, in words?

Messages come in one shape: `tool_calls` is a list of {"name", "arguments": object} with or without an "id", and the
results of tools have a "name", a "tool_call_id", both or neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from control_plane.text.tools.template_traits import TemplateTraits
from control_plane.text.tools.tool import Tool

Message = Mapping[str, Any]
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SHORT_ID_LENGTH = 9
_OPENING = "You can call these tools, each described by its name and a JSON Schema of its arguments:"
_CLOSING = (
    "To call tools, answer with nothing but a JSON object of this form: "
    '{"tool_calls": [{"name": "the name of a tool", "arguments": {"an argument": "its value"}}]}\n'
    "Where no tool helps, answer as you would without them."
)


def uses_tools(messages: Sequence[Message]) -> bool:
    """Whether calls or their results are among the messages."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def messages_for(traits: TemplateTraits, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages as the template understands them; `tools` are those that it does not offer by itself."""
    paired = list(_paired(messages))
    told = [_told(traits, message) for message in paired]
    if not traits.takes_results:
        told = list(_results_as_users(told))
    return _with_system_text(traits, told, _in_words(tools)) if tools else told


def _paired(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the messages with an id for every call, and id and name for every result that answers one."""
    open_calls: list[dict[str, Any]] = []
    num_calls = 0
    for message in messages:
        paired = dict(message)
        if message.get("tool_calls"):
            calls = [{"id": f"call_{num_calls + at}", **call} for at, call in enumerate(message["tool_calls"])]
            num_calls += len(calls)
            paired["tool_calls"] = calls
            open_calls += calls
        elif message["role"] == "tool":
            call = _answered(message, open_calls)
            if call is not None:
                open_calls.remove(call)
                paired |= {"name": call["name"], "tool_call_id": call["id"]}
        yield paired


def _answered(result: Message, open_calls: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the call that a result answers: by id, else by name, else the first one."""
    call_id, name = result.get("tool_call_id"), result.get("name")
    if call_id:
        return next((call for call in open_calls if call["id"] == call_id), None)
    return next((call for call in open_calls if name in (None, call["name"])), None)


def _told(traits: TemplateTraits, message: dict[str, Any]) -> dict[str, Any]:
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


def _results_as_users(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield results as the user's words, those in a row as one message: users take turns with the assistant."""
    said: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            of = f" of {message['name']}" if message.get("name") else ""
            said.append(f"The result{of}: {message['content']}")
        elif message["role"] == "user" and said:
            said.append(message["content"])
        else:
            if said:
                yield {"role": "user", "content": "\n".join(said)}
            said = []
            yield message
    if said:
        yield {"role": "user", "content": "\n".join(said)}


def _for_template(traits: TemplateTraits, call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    if traits.takes_argument_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": _call_id(traits, call["id"]), "type": "function", "function": function}


def _call_id(traits: TemplateTraits, call_id: str) -> str:
    """Return the id, or one of nine letters and digits that stands for it in this template."""
    if not traits.needs_short_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isalnum()):
        return call_id
    digest = blake2b(call_id.encode(errors="replace"), digest_size=_SHORT_ID_LENGTH).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def _in_words(tools: Sequence[Tool]) -> str:
    described = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join([_OPENING, *described, _CLOSING])


def _with_system_text(traits: TemplateTraits, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Put a text behind what the system says, or before what the user says first where there is no such role."""
    if not traits.takes_system:
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            return [{"role": "user", "content": text}, *messages]
        first = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
        return [*messages[:at], first, *messages[at + 1 :]]
    if messages and messages[0]["role"] == "system":
        said = messages[0]["content"]
        return [{**messages[0], "content": f"{said}\n\n{text}" if said else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
