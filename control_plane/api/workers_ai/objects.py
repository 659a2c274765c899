"""Which objects does Workers AI answer with?"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from control_plane.api.openai.objects import UsageObject
from control_plane.generation import AnswerEnd


class NativeCall(TypedDict):
    name: str
    arguments: dict[str, Any]


class NativeCallEvent(NativeCall):
    index: int


class NativeResult(TypedDict):
    response: Annotated[Any, Meta(description="Text; with response_format json_object or json_schema, that value.")]
    tool_calls: list[NativeCall]
    finish_reason: AnswerEnd | None
    usage: UsageObject


class NativeEvent(TypedDict):
    """One event of a native stream; the last one has the usage, the one before it all tool calls if there are any."""

    response: str
    tool_calls: NotRequired[list[NativeCallEvent]]
    p: NotRequired[Annotated[str, Meta(description="Filler of random length, so that sizes tell nothing.")]]
    finish_reason: NotRequired[AnswerEnd | None]
    usage: NotRequired[UsageObject]


class Problem(TypedDict):
    code: int
    message: str


class ErrorEnvelope(TypedDict):
    result: dict[str, Any] | None
    success: Literal[False]
    errors: Annotated[list[Problem], Meta(min_length=1)]
    messages: list[Any]


class BindingError(TypedDict):
    """What workerd's `env.AI` makes an exception of; JavaScript sees "<internalCode>: <description>"."""

    internalCode: int
    name: str
    message: str
    description: str


class Task(TypedDict):
    id: str
    name: str
    description: str


class UnitPrice(TypedDict):
    unit: str
    price: float
    currency: str


class ModelProperty(TypedDict):
    """`price` is a list of prices, the others are texts."""

    property_id: str
    value: str | list[UnitPrice]


class FoundModel(TypedDict):
    id: str
    source: int
    name: str
    description: str
    task: Task
    tags: list[str]
    properties: list[ModelProperty]
    created_at: str


class Page(TypedDict):
    page: int
    per_page: int
    count: int
    total_count: int


class FoundModels(TypedDict):
    result: list[FoundModel]
    success: Literal[True]
    errors: list[Problem]
    messages: list[Any]
    result_info: Page


class FoundTasks(TypedDict):
    result: list[Task]
    success: Literal[True]
    errors: list[Problem]
    messages: list[Any]
    result_info: Page


class Author(TypedDict):
    name: str


class FoundAuthors(TypedDict):
    result: list[Author]
    success: Literal[True]
    errors: list[Problem]
    messages: list[Any]
    result_info: Page


class Schemas(TypedDict):
    """Two JSON Schemas."""

    input: dict[str, Any]
    output: dict[str, Any]


class FoundSchemas(TypedDict):
    result: Schemas
    success: Literal[True]
    errors: list[Problem]
    messages: list[Any]
