"""Defines a piece of training text: a message, a sample of one exchange, a document of several samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a chat, as chat templates take it."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return the form that `apply_chat_template` takes."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Sample:
    """One exchange of one family. Its last message is the reply that a grader expects, word for word.

    `template` names the phrasing and `values` its contents: the held-out split uses both.
    A sample of plain text has no messages and is trained on as it stands.
    """

    family: str
    template: str
    values: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.text):
            raise ValueError(f"sample {self.template!r} needs either messages or text")
        if self.messages and self.messages[-1].role != "assistant":
            raise ValueError(f"sample {self.template!r} must end with the assistant's reply")


@dataclass(frozen=True)
class Document:
    """The text between two separators: a chat of one or more samples, or plain text."""

    samples: tuple[Sample, ...]
    system: str = ""

    @property
    def text(self) -> str:
        """Return the plain text, or nothing for a chat."""
        return self.samples[0].text

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools offered in this chat: those of the sample that brings some."""
        return next((sample.tools for sample in self.samples if sample.tools), ())

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the whole chat, the system message first."""
        opening = (Message("system", self.system),) if self.system else ()
        return opening + tuple(message for sample in self.samples for message in sample.messages)


def exchange(user: str, assistant: str) -> tuple[Message, ...]:
    """Return one question and its answer."""
    return Message("user", user), Message("assistant", assistant)
