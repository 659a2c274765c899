"""What is a message of a chat, and what do templates read of it?

The calls of an assistant come as OpenAI writes them or as Workers AI's native answers have them; each becomes a name
and an object of arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from control_plane.api.http.body import Body, ObjectOrText
from tandem_runtime.errors import InvalidRequest


class TextPart(Body):
    type: Literal["text"]
    text: str


def _text_of_parts(value: Any) -> Any:
    """Join a list of text parts; any other part is refused by name."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "without a type") if isinstance(part, dict) else "that is no object"
            raise ValueError(f"has a part {kind}; only {{type: 'text', text: '...'}} parts are supported")
    return "\n".join(part["text"] for part in value)


Content = Annotated[str | None, BeforeValidator(_text_of_parts, json_schema_input_type=str | list[TextPart] | None)]


class CalledFunction(Body):
    name: str | None = None
    arguments: ObjectOrText | None = None
    """An object, as it is or as text."""


class MessageToolCall(CalledFunction):
    """A call that an assistant made: OpenAI's {id, type, function}, or Workers AI's {name, arguments}."""

    harmless: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | None = None

    def call(self, field: str) -> dict[str, Any]:
        """Return name, arguments and id of the call at `field`; raises InvalidRequest."""
        function, at = (self, field) if self.function is None else (self.function, f"{field}.function")
        if not function.name:
            raise InvalidRequest(f"{at}.name is missing; send the name of the tool that was called", field=f"{at}.name")
        call = {"name": function.name, "arguments": _arguments(function.arguments, f"{at}.arguments")}
        return {"id": self.id, **call} if self.id else call


class Message(Body):
    harmless: ClassVar[frozenset[str]] = frozenset({"annotations"})
    unsupported: ClassVar[frozenset[str]] = frozenset({"function_call", "audio", "refusal", "reasoning_content"})
    remedies: ClassVar[Mapping[str, str]] = {"function_call": "send tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    """Of an assistant's message: what it called."""
    tool_call_id: str | None = None
    """Of a message by a tool: the call that it answers."""

    def for_template(self, field: str) -> dict[str, Any]:
        """Return what templates read; few know the role `developer`, which is a newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        said: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            calls = [each.call(f"{field}.tool_calls[{index}]") for index, each in enumerate(self.tool_calls)]
            said["tool_calls"] = calls
        return {"role": role, "content": self.content or ""} | {name: each for name, each in said.items() if each}


def messages_for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return the messages as templates read them; raises InvalidRequest for calls and results in others' messages."""
    for index, message in enumerate(messages):
        if message.tool_call_id and message.role != "tool":
            raise InvalidRequest(
                f"messages[{index}] has a tool_call_id and the role {message.role}; only a tool answers a call",
                field=f"messages[{index}].tool_call_id",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"messages[{index}] has tool_calls and the role {message.role}; only an assistant calls tools",
                field=f"messages[{index}].tool_calls",
            )
    told = [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]
    for index, (before, after) in enumerate(pairwise(told)):
        if after["role"] == "tool":
            told[index] = _as_call(before, after)
    return tuple(told)


def _as_call(message: dict[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call that an assistant's content is, before its result: so @cloudflare/ai-utils tells of calls."""
    if message["role"] != "assistant" or "tool_calls" in message:
        return message
    try:
        call = json.loads(message["content"])
    except (ValueError, RecursionError):
        return message  # ordinary words
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"} or call["name"] != result.get("name"):
        return message
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return message
    return {**message, "content": "", "tool_calls": [call]}


def _arguments(given: str | dict[str, Any] | None, field: str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is no JSON: {error}; send an object", field=field) from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest(f"{field} is no object; send one, as it is or as text", field=field)
    return given
