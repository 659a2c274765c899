"""How do the answers of `AI.run` and /ai/run look, whole and streamed, in either wire format?"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from control_plane.api.collected_choice import Answer, WholeCall, WholeChoice, add_call, collect, usage_json
from control_plane.api.http.frames import ALL_FILLERS, DONE, FILLERS, TextFrames, frame
from control_plane.api.openai.responses import ChatShape, CompletionShape, OpenAIShape
from control_plane.api.workers_ai.objects import NativeCallEvent, NativeEvent, NativeResult
from control_plane.api.workers_ai.schema import TextGenerationBody
from control_plane.generation import ModelDescription, Usage
from tandem_runtime.errors import InvalidRequest

_NOTHING = Usage(0, 0, 0, 0)


class Wire(Protocol):
    """How one model's answers are written."""

    async def result(self, answer: Answer) -> Any:
        """Read `answer` to its end and return what `AI.run` resolves to."""

    def frames(self, answer: Answer) -> AsyncGenerator[bytes]:
        """Yield the events of the stream, [DONE] included; those that come together are one piece."""


def wire_of(model: ModelDescription, body: TextGenerationBody, request_id: str) -> Wire:
    if model.wire_format == "native":
        return NativeWire(is_json=body.wants_json)
    # Calls have a place in a chat's message only.
    shape = CompletionShape if body.messages is None and not body.tools else ChatShape
    return OpenAIWire(shape(request_id, model.model_id, model, with_usage_chunk=False))


class NativeWire:
    """One event per piece of text, one with the usage. Of JSON, the whole answer is a value instead of a text."""

    def __init__(self, *, is_json: bool = False) -> None:
        self._is_json = is_json

    async def result(self, answer: Answer) -> NativeResult:
        (choice,) = await collect(answer)
        if choice.is_cut_in_call:
            raise _cut(choice)
        is_json = self._is_json and not choice.calls
        return {
            "response": _as_json(choice) if is_json else choice.text,
            "tool_calls": [{"name": call.name, "arguments": _raw(call.arguments)} for call in choice.calls],
            "finish_reason": choice.finish_reason,
            "usage": usage_json(answer.usage),
        }

    async def frames(self, answer: Answer) -> AsyncGenerator[bytes]:
        finish_reason = None
        calls: list[WholeCall] = []
        async for batch in answer.batches():
            piece = []
            for delta in batch:
                finish_reason = delta.finish_reason or finish_reason
                for call in delta.calls:
                    add_call(calls, call)
                if delta.text:
                    piece.append(_TEXT_EVENTS[FILLERS.next()].frame(delta.text))
            yield b"".join(piece)
        # All in one: some clients look no further than the first event with calls.
        whole = [_event_call(index, call) for index, call in enumerate(calls) if call.is_complete]
        if whole:
            yield frame(NativeEvent(response="", tool_calls=whole, p=FILLERS.next()))
        yield frame(NativeEvent(response="", finish_reason=finish_reason, usage=usage_json(answer.usage)))
        yield DONE


class OpenAIWire:
    """OpenAI's objects. Streamed, each chunk has the usage that came with it, and one native event has the sum.

    So Workers AI's newer models answer, but not on /ai/v1: OpenAI's clients know no native event.
    """

    def __init__(self, shape: OpenAIShape) -> None:
        self._shape = shape

    async def result(self, answer: Answer) -> Any:
        return self._shape.whole(await collect(answer), answer.usage)

    async def frames(self, answer: Answer) -> AsyncGenerator[bytes]:
        told = _NOTHING
        async for batch in answer.batches():
            piece = []
            for chunk in (chunk for delta in batch for chunk in self._shape.chunks(delta)):
                fresh, told = answer.usage - told, answer.usage
                piece.append(frame({**chunk, "p": FILLERS.next(), "usage": usage_json(fresh)}))
            yield b"".join(piece)
        yield frame({**self._shape.usage_chunk(answer.usage - told), "p": FILLERS.next()})
        yield frame(NativeEvent(response="", usage=usage_json(answer.usage)))
        yield DONE


def _cut(choice: WholeChoice) -> InvalidRequest:
    """Return the error of an answer that ended within a call, named if its name had come."""
    what = f"call of {choice.calls[-1].name}" if choice.calls and not choice.calls[-1].is_complete else "call"
    remedy = "raise max_tokens" if choice.finish_reason == "length" else "leave out what ends it before (stop)"
    return InvalidRequest(f"the answer ended ({choice.finish_reason}) before its {what} did; {remedy}", field="tools")


def _event_call(index: int, call: WholeCall) -> NativeCallEvent:
    return {"index": index, "name": call.name, "arguments": _raw(call.arguments)}


def _raw(text: str) -> Any:
    return msgspec.Raw(text.encode())


def _as_json(choice: WholeChoice) -> msgspec.Raw:
    """Return the answer as the value that it is, to the digit; raises InvalidRequest if it was cut off."""
    try:
        json.loads(choice.text)
    except RecursionError as error:
        raise InvalidRequest(
            "JSON Mode couldn't be met: the answer is nested too deeply to read; limit the schema's depth, or stream",
            field="response_format",
        ) from error
    except ValueError as error:
        remedy = "raise max_tokens" if choice.finish_reason == "length" else "leave out what ends it before (stop)"
        raise InvalidRequest(
            f"JSON Mode couldn't be met: the answer ended ({choice.finish_reason}) before its JSON did; {remedy}",
            field="response_format",
        ) from error
    return msgspec.Raw(choice.text.encode())


def _text_frames(filler: str) -> TextFrames:
    return TextFrames(lambda text: NativeEvent(response=text, p=filler))


_TEXT_EVENTS = {filler: _text_frames(filler) for filler in ALL_FILLERS}
"""By filler."""
