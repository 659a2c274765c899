"""What is a message of a chat, and what do templates read of it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from control_plane.faces.body import Body
from runtime.errors import InvalidRequest


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


class Message(Body):
    harmless: ClassVar[frozenset[str]] = frozenset({"annotations"})
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"tool_calls", "function_call", "audio", "refusal", "reasoning_content"}
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    """Of a message by a tool: the call that it answers."""

    def for_template(self) -> dict[str, str]:
        """Return what templates read; few know the role `developer`, which is a newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        said = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.content or ""} | {name: text for name, text in said.items() if text}


def messages_for_template(messages: Sequence[Message]) -> tuple[dict[str, str], ...]:
    """Return the messages as templates read them; raises InvalidRequest for a tool's id where no tool speaks."""
    for index, message in enumerate(messages):
        if message.tool_call_id and message.role != "tool":
            raise InvalidRequest(
                f"messages[{index}] has a tool_call_id and the role {message.role}; only a tool answers a call",
                field=f"messages[{index}].tool_call_id",
            )
    return tuple(message.for_template() for message in messages)
