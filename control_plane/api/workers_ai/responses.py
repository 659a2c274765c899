"""Workers AI's objects, and the answers of `AI.run` and /ai/run, whole and streamed, in both wire formats."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, NotRequired, Protocol, TypedDict

import msgspec
from msgspec import Meta

from control_plane.api.answer_classes import AnswerClasses, SeamObject
from control_plane.api.collected_choice import Answer, CollectedCall, CollectedChoice, add_call, collect
from control_plane.api.explanation_objects import ExplainedObject
from control_plane.api.http.explained import Explained
from control_plane.api.http.sse import ALL_FILLERS, DONE, FILLERS, TextFrames, frame
from control_plane.api.openai.responses import (
    ChatSerializer,
    CompletionSerializer,
    ResponseSerializer,
    ServerTiming,
    UsageObject,
    usage_json,
)
from control_plane.generation import AnswerEnd, ModelDescription, Usage
from control_plane.text.prepared import AnswerForm
from tandem_runtime.errors import InvalidRequest


class NativeCall(TypedDict):
    name: str
    arguments: dict[str, Any]


class NativeCallEvent(NativeCall):
    index: int


class NativeResult(TypedDict):
    response: Annotated[Any, Meta(description="Text; with response_format json_object or json_schema, that value.")]
    reasoning_content: NotRequired[Annotated[str, Meta(description="The thinking before the answer, if there is any.")]]
    tool_calls: list[NativeCall]
    finish_reason: AnswerEnd | None
    usage: UsageObject
    seams: NotRequired[list[SeamObject]]
    tandem: NotRequired[ExplainedObject]


class NativeEvent(TypedDict):
    """One event of a native stream. The last event has the usage; the event before it has all tool calls, if any."""

    response: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[NativeCallEvent]]
    p: NotRequired[
        Annotated[str, Meta(description="Filler of random length, so that the event's size does not reveal its text.")]
    ]
    finish_reason: NotRequired[AnswerEnd | None]
    usage: NotRequired[UsageObject]
    seams: NotRequired[list[SeamObject]]
    server_timing: NotRequired[ServerTiming]
    tandem: NotRequired[ExplainedObject]


class Problem(TypedDict):
    code: int
    message: str


class ErrorEnvelope(TypedDict):
    result: dict[str, Any] | None
    success: Literal[False]
    errors: Annotated[list[Problem], Meta(min_length=1)]
    messages: list[Any]


class BindingError(TypedDict):
    """workerd's `env.AI` turns this into an exception; JavaScript sees "<internalCode>: <description>"."""

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
    """The value of `price` is a list of prices; other values are texts."""

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


_NO_USAGE = Usage(0, 0, 0, 0)


class Wire(Protocol):
    """Writes the answers of one model."""

    async def result(self, answer: Answer) -> Any:
        """Read `answer` to its end and return the result of `AI.run`."""

    def frames(self, answer: Answer, explained: Explained) -> AsyncGenerator[bytes]:
        """Yield the stream's events, [DONE] included; events of one batch are one piece."""


def wire_of(model: ModelDescription, form: AnswerForm, request_id: str) -> Wire:
    if model.wire_format == "native":
        return NativeWire(is_json=form.is_json, with_thinking=form.with_thinking)
    if not form.is_chat:
        return OpenAIWire(CompletionSerializer(request_id, model.model_id, model, with_usage_chunk=False))
    serializer = ChatSerializer(request_id, model.model_id, model, with_usage_chunk=False)
    serializer.with_thinking = form.with_thinking
    return OpenAIWire(serializer)


class NativeWire:
    """Workers AI's native format: one event per piece of text, then one with the usage.

    In JSON mode, `response` of the whole answer is the JSON value instead of a text.
    """

    def __init__(self, *, is_json: bool = False, with_thinking: bool = True) -> None:
        self._is_json = is_json
        self._with_thinking = with_thinking

    async def result(self, answer: Answer) -> NativeResult:
        (choice,) = await collect(answer)
        if choice.is_cut_in_call:
            raise _cut(choice)
        is_json = self._is_json and not choice.calls
        thinking: dict[str, Any] = {}
        if choice.thinking and self._with_thinking:
            thinking = {"reasoning_content": choice.thinking}
        return {
            "response": _as_json(choice) if is_json else choice.text,
            **thinking,  # type: ignore[typeddict-item]
            "tool_calls": [{"name": call.name, "arguments": _raw(call.arguments)} for call in choice.calls],
            "finish_reason": choice.finish_reason,
            "usage": usage_json(answer.usage),
            **_seams(AnswerClasses(answer)),
        }

    async def frames(self, answer: Answer, explained: Explained) -> AsyncGenerator[bytes]:
        finish_reason = None
        calls: list[CollectedCall] = []
        async for batch in answer.batches():
            piece = []
            for delta in batch:
                finish_reason = delta.finish_reason or finish_reason
                for call in delta.calls:
                    add_call(calls, call)
                if delta.thinking and self._with_thinking:
                    piece.append(frame(NativeEvent(response="", reasoning_content=delta.thinking, p=FILLERS.next())))
                if delta.text:
                    piece.append(_TEXT_EVENTS[FILLERS.next()].frame(delta.text))
            yield b"".join(piece)
        # One event with all calls: some clients read only the first event that has calls.
        whole = [_event_call(index, call) for index, call in enumerate(calls) if call.is_complete]
        if whole:
            yield frame(NativeEvent(response="", tool_calls=whole, p=FILLERS.next()))
        last = NativeEvent(response="", finish_reason=finish_reason, usage=usage_json(answer.usage))
        yield explained.in_last(frame({**last, **_seams(AnswerClasses(answer))}))
        yield explained.event(NativeEvent(response=""))
        yield DONE


class OpenAIWire:
    """OpenAI's objects. In a stream, each chunk has the usage since the last one, and a native event has the sum.

    Workers AI's newer models answer so on /ai/run. On /ai/v1 there is no native event: OpenAI's clients do not know it.
    """

    def __init__(self, serializer: ResponseSerializer) -> None:
        self._serializer = serializer

    async def result(self, answer: Answer) -> Any:
        classes, choices = AnswerClasses(answer), await collect(answer)
        if classes.is_mixed:
            self._serializer.in_class(classes.first)
        return {**self._serializer.whole(choices, answer.usage), **_seams(classes)}

    async def frames(self, answer: Answer, explained: Explained) -> AsyncGenerator[bytes]:
        reported, classes = _NO_USAGE, AnswerClasses(answer)
        async for batch in answer.batches():
            if classes.is_mixed:
                batch = classes.marked(batch, self._serializer.in_class)
            piece = []
            for chunk in (chunk for delta in batch for chunk in self._serializer.chunks(delta)):
                added, reported = answer.usage - reported, answer.usage
                piece.append(frame({**chunk, "p": FILLERS.next(), "usage": usage_json(added)}))
            yield b"".join(piece)
        yield frame({**self._serializer.usage_chunk(answer.usage - reported), "p": FILLERS.next()})
        last = NativeEvent(response="", usage=usage_json(answer.usage))
        yield explained.in_last(frame({**last, **_seams(classes)}))
        yield explained.event(NativeEvent(response=""))
        yield DONE


def _seams(classes: AnswerClasses) -> dict[str, list[SeamObject]]:
    """Return the fields beside the usage of an answer that crosses numerics classes; {} for almost every answer."""
    seams = classes.seams
    return {"seams": seams} if seams else {}


def _cut(choice: CollectedChoice) -> InvalidRequest:
    """Return the error for an answer that ended within a tool call; it has the call's name if that is known."""
    what = f"call of {choice.calls[-1].name}" if choice.calls and not choice.calls[-1].is_complete else "call"
    remedy = (
        "raise max_tokens" if choice.finish_reason == "length" else "send a stop that does not end the answer early"
    )
    return InvalidRequest(f"the answer ended ({choice.finish_reason}) before its {what} did; {remedy}", field="tools")


def _event_call(index: int, call: CollectedCall) -> NativeCallEvent:
    return {"index": index, "name": call.name, "arguments": _raw(call.arguments)}


def _raw(text: str) -> Any:
    return msgspec.Raw(text.encode())


def _as_json(choice: CollectedChoice) -> msgspec.Raw:
    """Return the answer's JSON without re-encoding it. Raise InvalidRequest if the answer was cut off."""
    try:
        json.loads(choice.text)
    except RecursionError as error:
        raise InvalidRequest(
            "JSON Mode couldn't be met: the answer is nested too deeply to read; limit the schema's depth, or stream",
            field="response_format",
        ) from error
    except ValueError as error:
        remedy = (
            "raise max_tokens" if choice.finish_reason == "length" else "send a stop that does not end the answer early"
        )
        raise InvalidRequest(
            f"JSON Mode couldn't be met: the answer ended ({choice.finish_reason}) before its JSON did; {remedy}",
            field="response_format",
        ) from error
    return msgspec.Raw(choice.text.encode())


def _text_frames(filler: str) -> TextFrames:
    return TextFrames(lambda text: NativeEvent(response=text, p=filler))


_TEXT_EVENTS = {filler: _text_frames(filler) for filler in ALL_FILLERS}
"""Encoded events by filler."""
