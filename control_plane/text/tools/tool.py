"""Which tools may a model call in its answer, and must it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """The JSON Schema of its arguments, an object; None: it takes none."""
    is_strict: bool = False
    """Refuse what a grammar cannot hold arguments to, instead of letting them be any object."""
    field: str = "tools"
    """Where in the request it stands."""

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates read it: OpenAI's shape."""
        said: dict[str, Any] = {"name": self.name}
        if self.description:
            said["description"] = self.description
        said["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": said}


@dataclass(frozen=True)
class ToolUse:
    """The tools that are offered in a chat; at least one."""

    tools: tuple[Tool, ...]
    callable_names: frozenset[str]
    """Those of them that may be called."""
    must_call: bool = False
    at_most_one: bool = False

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.callable_names)


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: the first has the name and no arguments, the others a piece of the arguments' JSON each."""

    index: int
    """Of the call in its answer."""
    call_id: str
    name: str | None = None
    arguments: str = ""
    is_last: bool = False
    """The call is complete with it."""
