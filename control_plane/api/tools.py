"""In which fields do clients offer tools, and what do these mean?

tools                 OpenAI's {type: function, function: {name, description, parameters, strict}}, or the same without
                      the wrapping, as Workers AI takes it
tool_choice           auto, none, required (any); a function by name, in the shapes that clients have for that; or
                      OpenAI's allowed_tools
parallel_tool_calls   false: one call at the most
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from control_plane.api.http.body import Body
from control_plane.text.tools.tool import Tool, ToolUse
from tandem_runtime.errors import InvalidRequest, Unsupported

MAX_TOOLS = 128
_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_AT_MOST_ONE = "disable_parallel_tool_use"
_CHOICE_KEYS = {"type", "function", "name", "toolName", "allowed_tools", "mode", "tools", _AT_MOST_ONE}
_Name = Annotated[str, Field(json_schema_extra={"pattern": f"^{_NAME}$"})]


class FunctionBody(Body):
    name: _Name | None = None
    """Letters, digits and _ . : / - (1 to 128 of them)."""
    description: str | None = None
    """When to call it, and what it does."""
    parameters: dict[str, Any] | None = None
    """The JSON Schema of its arguments, an object; without it there are none."""
    strict: bool | None = None
    """Refuse a schema that arguments cannot be held to, instead of letting them be any object."""


class ToolBody(FunctionBody):
    """A function, in OpenAI's wrapping or bare."""

    type: Annotated[str, Field(json_schema_extra={"const": "function"})] | None = None
    function: FunctionBody | None = None

    def tool(self, field: str) -> Tool:
        """Return the tool that stands at `field`; raises InvalidRequest."""
        if self.type not in (None, "function"):
            raise Unsupported(f"{field}.type {self.type!r} is not supported here; send function", field=f"{field}.type")
        if self.function is not None and self.name is not None:
            raise InvalidRequest(f"{field} has a function and a name; leave one of them out", field=field)
        function, at = (self, field) if self.function is None else (self.function, f"{field}.function")
        if function.name is None:
            raise InvalidRequest(f"{at}.name is missing; send it", field=f"{at}.name")
        if not re.fullmatch(_NAME, function.name):
            raise InvalidRequest(
                f"{at}.name is {function.name!r}; 1 to 128 letters, digits and _ . : / - make a name",
                field=f"{at}.name",
            )
        is_strict = bool(function.strict or self.strict)
        return Tool(function.name, function.description or "", function.parameters, is_strict, f"{at}.parameters")


@dataclass(frozen=True)
class ToolChoice:
    mode: str = "auto"
    names: tuple[str, ...] = ()
    """Only these may be called; empty: any."""
    at_most_one: bool = False


def _chosen(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(_MODES[value])
    choice = _chosen_in(value) if isinstance(value, dict) and value.keys() <= _CHOICE_KEYS else None
    if choice is None:
        raise ValueError("must be auto, none, required or {type: 'function', function: {name: '...'}}")
    return replace(choice, at_most_one=value.get(_AT_MOST_ONE) is True) if isinstance(value, dict) else choice


def _chosen_in(value: dict[str, Any]) -> ToolChoice | None:
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
    if not isinstance(tools, list) or not tools or value.get("mode", "auto") not in _MODES:
        return None
    names = [_name_in(each) if isinstance(each, dict) else None for each in tools]
    found = tuple(name for name in names if name is not None)
    return ToolChoice(_MODES[value.get("mode", "auto")], found) if len(found) == len(names) else None


def _name_in(value: dict[str, Any]) -> str | None:
    """Return the name in {name}, {function: {name}} or {toolName}: clients of several APIs come here."""
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
Tools = Annotated[list[ToolBody], Field(json_schema_extra={"maxItems": MAX_TOOLS})] | None
Choice = Annotated[ToolChoice | None, PlainValidator(_chosen), Field(json_schema_extra=_CHOICE_SCHEMA)]


def tool_use(tools: Sequence[ToolBody] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """Return the tools that an answer may call, None if it may call none; raises InvalidRequest."""
    choice = choice or ToolChoice()
    if tools and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} of them, {MAX_TOOLS} is the most; send fewer", field="tools")
    offered = tuple(_offered(tools or ()))
    names = frozenset(tool.name for tool in offered)
    missing = [name for name in choice.names if name not in names]
    if missing or (choice.mode == "required" and not offered):
        known = ", ".join(sorted(names)) or "no tools"
        wanted = missing[0] if missing else choice.mode
        remedy = "name one that is in tools" if offered else "send tools, or leave it out"
        raise InvalidRequest(f"tool_choice wants {wanted}, and the request has {known}; {remedy}", field="tool_choice")
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
                f"tools[{index}] is a second tool by the name of {tool.name}; name each of them differently",
                field=f"tools[{index}]",
            )
        seen.add(tool.name)
        yield tool
