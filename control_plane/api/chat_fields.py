"""Fields of chats: messages and tools.

messages              an assistant's calls as OpenAI writes them, or as in Workers AI's native answers; both become a
                      name and an object of arguments
tools                 OpenAI's {type: function, function: {name, description, parameters, strict}}, or the function
                      without the wrapper, as in Workers AI
tool_choice           auto, none, required (any); a function by name, in the forms that clients use; or OpenAI's
                      allowed_tools
parallel_tool_calls   false: at most one call
chat_template_kwargs  variables of the model's chat template, such as enable_thinking
reasoning_effort      becomes variables, under the names that published templates have for it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from control_plane.api.http.body import Body, ObjectOrText, at_most, check_json_bytes, check_shape
from control_plane.api.http.bounds import (
    MAX_ARGUMENTS_BYTES,
    MAX_DESCRIPTION_CHARACTERS,
    MAX_ID_CHARACTERS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PARAMETERS_BYTES,
    MAX_PARTS,
    MAX_SHOWN_CHARACTERS,
    MAX_TEMPLATE_VARIABLES,
    MAX_TEMPLATE_VARIABLES_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOL_CALLS_IN_ALL,
    MAX_TOOLS,
)
from control_plane.text.tool import Tool, ToolUse
from tandem_runtime.errors import InvalidRequest, Unsupported

_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_AT_MOST_ONE = "disable_parallel_tool_use"
_CHOICE_KEYS = {"type", "function", "name", "toolName", "allowed_tools", "mode", "tools", _AT_MOST_ONE}


class TextPart(Body):
    type: Literal["text"]
    text: str


def _text_of_parts(value: Any) -> Any:
    """Join a list of text parts. Raise ValueError naming any other part."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise ValueError(f"has {len(value):,} parts, the maximum is {MAX_PARTS:,}; join some of them")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "without a type") if isinstance(part, dict) else "that is no object"
            shown = str(kind)[:MAX_SHOWN_CHARACTERS]
            raise ValueError(f"has a part {shown}; only {{type: 'text', text: '...'}} parts are supported")
    return "\n".join(part["text"] for part in value)


_Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Content = Annotated[str | None, BeforeValidator(_text_of_parts, json_schema_input_type=str | _Parts | None)]
_Id = Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
_AnyName = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class CalledFunction(Body):
    name: _AnyName | None = None
    arguments: ObjectOrText | None = None
    """An object, or an object as JSON text."""


class MessageToolCall(CalledFunction):
    """A call by an assistant: OpenAI's {id, type, function}, or Workers AI's {name, arguments}."""

    harmless: ClassVar[frozenset[str]] = frozenset({"index"})

    id: _Id | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | None = None

    def call(self, field: str) -> dict[str, Any]:
        """Return name, arguments and id of the call at `field`. Raise InvalidRequest."""
        function, at = (self, field) if self.function is None else (self.function, f"{field}.function")
        if not function.name:
            raise InvalidRequest(f"{at}.name is missing; send the name of the tool that was called", field=f"{at}.name")
        call = {"name": function.name, "arguments": _arguments(function.arguments, f"{at}.arguments")}
        return {"id": self.id, **call} if self.id else call


class Message(Body):
    harmless: ClassVar[frozenset[str]] = frozenset({"annotations"})
    unsupported: ClassVar[frozenset[str]] = frozenset({"function_call", "audio", "refusal"})
    remedies: ClassVar[Mapping[str, str]] = {"function_call": "send tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: _AnyName | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    """In an assistant's message: its tool calls."""
    tool_call_id: _Id | None = None
    """In a tool's message: the id of the call that it answers."""
    reasoning_content: str | None = None
    """In an assistant's message: its thinking. The model's chat template keeps it, or drops it from earlier turns."""
    reasoning: str | None = None
    """Another name of reasoning_content."""

    def for_template(self, field: str) -> dict[str, Any]:
        """Return the message for templates. The role `developer` becomes `system`, which more templates know."""
        role = "system" if self.role == "developer" else self.role
        others: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.role == "assistant" and (thinking := self.reasoning_content or self.reasoning):
            others |= {"reasoning_content": thinking, "thinking": thinking}  # gpt-oss has the latter
        if self.tool_calls:
            calls = [each.call(f"{field}.tool_calls[{index}]") for index, each in enumerate(self.tool_calls)]
            others["tool_calls"] = calls
        return {"role": role, "content": self.content or ""} | {name: each for name, each in others.items() if each}


Messages = Annotated[
    list[Message],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    at_most(MAX_MESSAGES),
]
"""Validation ends at the first wrong message: a report of all of them would cost more than the chat."""


def messages_for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return the messages for templates. Raise InvalidRequest for calls or results in messages of other roles."""
    num_calls = sum(len(message.tool_calls) for message in messages if message.tool_calls)
    if num_calls > MAX_TOOL_CALLS_IN_ALL:
        raise InvalidRequest(
            f"messages have {num_calls:,} tool calls, the maximum is {MAX_TOOL_CALLS_IN_ALL:,}; leave out the oldest",
            field="messages",
        )
    for index, message in enumerate(messages):
        if message.tool_call_id and message.role != "tool":
            raise InvalidRequest(
                f"messages[{index}] has a tool_call_id and the role {message.role}; only tool messages can have one",
                field=f"messages[{index}].tool_call_id",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"messages[{index}] has tool_calls and the role {message.role}; only assistant messages can have them",
                field=f"messages[{index}].tool_calls",
            )
    rendered = [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]
    for index, (before, after) in enumerate(pairwise(rendered)):
        if after["role"] == "tool":
            rendered[index] = _as_call(before, after)
    return tuple(rendered)


def _as_call(message: dict[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Read the content of an assistant's message before a result as a call: @cloudflare/ai-utils sends calls so."""
    if message["role"] != "assistant" or "tool_calls" in message or len(message["content"]) > MAX_ARGUMENTS_BYTES:
        return message
    try:
        call = json.loads(message["content"])
    except (ValueError, RecursionError):
        return message  # ordinary text
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"} or call["name"] != result.get("name"):
        return message
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return message
    return {**message, "content": "", "tool_calls": [call]}


def _arguments(value: str | dict[str, Any] | None, field: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not JSON: {error}; send an object", field=field) from error
        if isinstance(value, dict):
            check_shape(value, field, field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} is not an object; send an object, or an object as JSON text", field=field)
    return value


def _parameters(value: Any) -> Any:
    return check_json_bytes(value, MAX_PARAMETERS_BYTES) if isinstance(value, dict) else value


_Name = Annotated[str, Field(json_schema_extra={"pattern": f"^{_NAME}$"})]


class FunctionBody(Body):
    name: _Name | None = None
    """1 to 128 letters, digits and _ . : / -"""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    """What the tool does, and when to call it."""
    parameters: Annotated[dict[str, Any], BeforeValidator(_parameters)] | None = None
    """The JSON Schema of the arguments, an object; without it, the tool has no arguments."""
    strict: bool | None = None
    """Refuse a schema that the grammar cannot enforce, instead of accepting any object as arguments."""


class ToolBody(FunctionBody):
    """A function, in OpenAI's wrapper or bare."""

    type: Annotated[str, Field(json_schema_extra={"const": "function"})] | None = None
    function: FunctionBody | None = None

    def tool(self, field: str) -> Tool:
        """Return the tool at `field`. Raise InvalidRequest."""
        if self.type not in (None, "function"):
            kind = self.type[:MAX_SHOWN_CHARACTERS]
            raise Unsupported(f"{field}.type {kind!r} is not supported here; send function", field=f"{field}.type")
        if self.function is not None and self.name is not None:
            raise InvalidRequest(f"{field} has a function and a name; leave one of them out", field=field)
        function, at = (self, field) if self.function is None else (self.function, f"{field}.function")
        if function.name is None:
            raise InvalidRequest(f"{at}.name is missing; send it", field=f"{at}.name")
        if not re.fullmatch(_NAME, function.name):
            raise InvalidRequest(
                f"{at}.name is {function.name[:MAX_SHOWN_CHARACTERS]!r}; use 1 to 128 letters, digits and _ . : / -",
                field=f"{at}.name",
            )
        is_strict = bool(function.strict or self.strict)
        return Tool(function.name, function.description or "", function.parameters, is_strict, f"{at}.parameters")


@dataclass(frozen=True)
class ToolChoice:
    mode: str = "auto"
    names: tuple[str, ...] = ()
    """Only these tools may be called; empty for all."""
    at_most_one: bool = False


def _parsed_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(_MODES[value])
    choice = _parsed_choice_object(value) if isinstance(value, dict) and value.keys() <= _CHOICE_KEYS else None
    if choice is None:
        raise ValueError("must be auto, none, required or {type: 'function', function: {name: '...'}}")
    return replace(choice, at_most_one=value.get(_AT_MOST_ONE) is True) if isinstance(value, dict) else choice


def _parsed_choice_object(value: dict[str, Any]) -> ToolChoice | None:
    kind = value.get("type", "function")
    if kind == "allowed_tools":
        allowed = value.get("allowed_tools", value)
        return _allowed(allowed) if isinstance(allowed, dict) else None
    if kind in _MODES and value.keys() <= {"type", _AT_MOST_ONE}:
        return ToolChoice(_MODES[kind])
    name = _name_in(value)
    return ToolChoice("required", (name,)) if kind in ("function", "tool") and name is not None else None


def _allowed(value: dict[str, Any]) -> ToolChoice | None:
    tools = value.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS or value.get("mode", "auto") not in _MODES:
        return None
    names = [_name_in(each) if isinstance(each, dict) else None for each in tools]
    found = tuple(name for name in names if name is not None)
    return ToolChoice(_MODES[value.get("mode", "auto")], found) if len(found) == len(names) else None


def _name_in(value: dict[str, Any]) -> str | None:
    """Return the name in {name}, {function: {name}} or {toolName}: clients of several APIs send these."""
    function = value.get("function")
    inside = function.get("name") if isinstance(function, dict) else function
    found = [name for name in (inside, value.get("name"), value.get("toolName")) if isinstance(name, str)]
    return found[0] if found else None


_Names = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["auto", "none", "required"], "type": "string"},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": _Names},
            "required": ["type", "function"],
        },
        {"type": "null"},
    ]
}
Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
Choice = Annotated[ToolChoice | None, PlainValidator(_parsed_choice), Field(json_schema_extra=_CHOICE_SCHEMA)]


def tool_use(tools: Sequence[ToolBody] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """Return the tools that an answer may call; None for none. Raise InvalidRequest."""
    choice = choice or ToolChoice()
    offered = tuple(_offered(tools or ()))
    names = frozenset(tool.name for tool in offered)
    missing = [name for name in choice.names if name not in names]
    if missing or (choice.mode == "required" and not offered):
        known = ", ".join(sorted(names)) or "no tools"
        wanted = missing[0][:MAX_SHOWN_CHARACTERS] if missing else choice.mode
        remedy = "name a tool of the request" if offered else "send tools, or leave it out"
        raise InvalidRequest(f"tool_choice is {wanted}, but the request has {known}; {remedy}", field="tool_choice")
    if not offered or choice.mode == "none":
        return None
    return ToolUse(
        offered,
        frozenset(choice.names) or names,
        must_call=choice.mode == "required",
        at_most_one=parallel is False or choice.at_most_one,
    )


def _offered(tools: Sequence[ToolBody]) -> Iterator[Tool]:
    seen: set[str] = set()
    for index, body in enumerate(tools):
        tool = body.tool(f"tools[{index}]")
        if tool.name in seen:
            raise InvalidRequest(
                f"tools[{index}] is a second tool named {tool.name}; give each tool its own name",
                field=f"tools[{index}]",
            )
        seen.add(tool.name)
        yield tool


# --------------------------------------------------------------------------------------------- the template's variables

_RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "tokenize", "raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace",
    }
)  # fmt: skip
"""What a chat template has already, by other fields or by itself."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_EFFORT_SCHEMA: dict[str, Any] = {"enum": [*_EFFORTS, None]}


def _template_variables(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"has {len(value):,} entries, the maximum is {MAX_TEMPLATE_VARIABLES}; send fewer")
    for name in value:
        if not _VARIABLE.fullmatch(name) or name.endswith("_token") or name in _RESERVED:
            raise ValueError(f"has {name[:MAX_SHOWN_CHARACTERS]!r}, which a request cannot set; leave it out")
    return check_json_bytes(value, MAX_TEMPLATE_VARIABLES_BYTES)


def _effort(value: Any) -> Any:
    if value is not None and value not in _EFFORTS:
        raise ValueError(f"must be one of {', '.join(_EFFORTS)}; leave it out for the model's default")
    return value


class ChatTemplateFields(Body):
    """Variables of the model's chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_variables)] | None = None
    """Variables of the model's chat template, such as enable_thinking. A template ignores what it does not have."""
    reasoning_effort: Annotated[str | None, BeforeValidator(_effort), Field(json_schema_extra=_EFFORT_SCHEMA)] = None
    """How much the model thinks before it answers: the template's variables reasoning_effort and enable_thinking."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the template's variables. Those that the request names itself take precedence."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            # gpt-oss has reasoning_effort, Qwen3 and GLM enable_thinking, DeepSeek V3.1 and Granite thinking.
            variables = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return variables | (self.chat_template_kwargs or {})


class ThinkingFields(ChatTemplateFields):
    """What a chat may say about the thinking before its answer."""

    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Most tokens of the thinking: then it ends, and the answer begins. vLLM's field."""
    include_reasoning: bool | None = None
    """false: the answer has no reasoning_content; the thinking is computed and counted all the same."""
