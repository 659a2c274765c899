"""Tools that a model may call, and the deltas of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """The JSON Schema of the arguments, an object; None if the tool has no arguments."""
    is_strict: bool = False
    """Refuse a schema that the grammar cannot enforce, instead of accepting any object as arguments."""
    field: str = "tools"
    """The tool's field in the request, for error messages."""

    def for_template(self, *, needs_description: bool = False) -> dict[str, Any]:
        """Return the tool in OpenAI's format, which chat templates read; `needs_description`: even an empty one."""
        function: dict[str, Any] = {"name": self.name}
        if self.description or needs_description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat request; at least one."""

    tools: tuple[Tool, ...]
    callable_names: frozenset[str]
    """Names of the tools that may be called."""
    must_call: bool = False
    at_most_one: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.callable_names)


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: the first has the name and no arguments, the others have pieces of the arguments' JSON."""

    index: int
    """Index of the call in its answer."""
    call_id: str
    name: str | None = None
    arguments: str = ""
    is_last: bool = False
    """Whether this delta completes the call."""
