"""OpenAI's objects, and the serializers that write answers as these objects, whole and in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from control_plane.api.answer_classes import system_fingerprint
from control_plane.api.collected_choice import CollectedChoice
from control_plane.api.explanation_objects import ExplainedObject
from control_plane.api.http.sse import TextFrames, frame
from control_plane.generation import AnswerEnd, FinishReason, ModelDescription, Usage
from control_plane.text.choice import TextDelta, TextLogprobs, TokenText
from control_plane.text.tool import CallDelta

ServerTiming = Annotated[str, Meta(description="In a stream's last event: the durations, as in Server-Timing.")]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageObject(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    neurons: NotRequired[float]


class ChatToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprobs]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: Annotated[str, Meta(description="A JSON object as text; incomplete if the answer was cut.")]


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="null if the answer has calls and no text.")]
    refusal: None
    reasoning_content: NotRequired[Annotated[str, Meta(description="The thinking before the answer, if there is any.")]]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    tandem: NotRequired[ExplainedObject]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A call's first delta has id, type and name, and empty arguments; later deltas have pieces of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnswerEnd | None


class ChatChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]
    server_timing: NotRequired[ServerTiming]
    tandem: NotRequired[ExplainedObject]


class CompletionLogprobs(TypedDict):
    """Four parallel lists. A prompt's first token has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(TypedDict):
    """A plain completion, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]
    server_timing: NotRequired[ServerTiming]
    tandem: NotRequired[ExplainedObject]


class _Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    aliases: list[str]


class ModelObject(_Model, total=False):
    parent: str
    """Of an adapter: the id of its model."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


class WorkerList(TypedDict):
    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], Meta(description="State, load and memory of each worker.")]


_SMALLEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; the value is OpenAI's."""


class ResponseSerializer(ABC):
    """Writes one answer as OpenAI's JSON objects; subclasses differ between chat and plain completions."""

    def __init__(self, request_id: str, model_name: str, model: ModelDescription, *, with_usage_chunk: bool) -> None:
        fingerprint = system_fingerprint(model)
        self._base = {
            "id": f"{self.id_prefix}-{request_id.replace('-', '')}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        self._chunk_base = {**self._base, "object": self.chunk_object}
        if with_usage_chunk:
            self._chunk_base["usage"] = None
        self._begun: set[int] = set()
        """Indices of choices that have had a chunk."""
        self._text_frames: dict[int, TextFrames] = {}
        """By choice, with the present system fingerprint."""
        self._frames_by_class = {fingerprint: self._text_frames}
        self.num_finished = 0
        """Choices whose end is written."""

    id_prefix = ""
    chunk_object = ""

    def in_class(self, fingerprint: str) -> None:
        """Write this system fingerprint from now on."""
        if self._base["system_fingerprint"] != fingerprint:
            self._base["system_fingerprint"] = self._chunk_base["system_fingerprint"] = fingerprint
            self._text_frames = self._frames_by_class.setdefault(fingerprint, {})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._chunk_base, "choices": [], "usage": usage_json(usage)}

    def extra_chunk(self) -> dict[str, Any]:
        """Return a chunk without a choice, for what comes after the answer."""
        return {**self._chunk_base, "choices": []}

    @abstractmethod
    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> dict[str, Any]:
        """Return the object of a complete answer."""

    @abstractmethod
    def chunks(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta."""

    def counted_chunks(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Return the chunks of a delta; count the choice that it ends."""
        self.num_finished += delta.finish_reason is not None
        return self.chunks(delta)

    def frames(self, delta: TextDelta) -> bytes:
        """Return the chunks of a delta as events of a stream."""
        index = delta.choice_index
        is_text = delta.text and not (
            delta.calls or delta.logprobs or delta.thinking or delta.finish_reason is not None
        )
        if not is_text or index not in self._begun:
            return b"".join([frame(chunk) for chunk in self.counted_chunks(delta)])
        if index not in self._text_frames:
            self._text_frames[index] = TextFrames(lambda text: next(self.chunks(TextDelta(index, text))))
        return self._text_frames[index].frame(delta.text)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk_base, "choices": [choice]}


class ChatSerializer(ResponseSerializer):
    """Writes `chat.completion` objects."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    with_thinking = True
    """Whether answers have the thinking before them, in a field of its own."""

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> dict[str, Any]:
        rendered = [
            {
                "index": index,
                "message": _message(choice, with_thinking=self.with_thinking),
                "logprobs": _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._base, "object": "chat.completion", "choices": rendered, "usage": usage_json(usage)}

    def chunks(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the chunk that introduces a choice, then chunks for text, calls and finish reason, as they apply."""
        index, logprobs = delta.choice_index, _chat_logprobs(delta.logprobs)
        if index not in self._begun:
            self._begun.add(index)
            content = None if delta.calls and not delta.text else ""
            yield self._chunk(_chat_choice(index, {"role": "assistant", "content": content}))
        if delta.thinking and self.with_thinking:
            yield self._chunk(_chat_choice(index, {"reasoning_content": delta.thinking}))
        if delta.text or (logprobs and not delta.calls):
            text = {"content": delta.text} if delta.text else {}
            yield self._chunk(_chat_choice(index, text, logprobs=logprobs))
            logprobs = None
        for call in delta.calls:
            yield self._chunk(_chat_choice(index, {"tool_calls": [_call_delta(call)]}, logprobs=logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            yield self._chunk(_chat_choice(index, {}, finish_reason=delta.finish_reason))


@dataclass(frozen=True)
class PromptEcho:
    """The prompt that a choice's text begins with, and the log probabilities of its tokens if requested."""

    text: str = ""
    first_token: str = ""
    logprobs: tuple[TextLogprobs, ...] | None = None
    """Of every token but the first."""


class CompletionSerializer(ResponseSerializer):
    """Writes `text_completion` objects; with `echoes`, each choice's text begins with its prompt."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(
        self,
        request_id: str,
        model_name: str,
        model: ModelDescription,
        *,
        with_usage_chunk: bool,
        echoes: Sequence[PromptEcho] = (),
    ) -> None:
        super().__init__(request_id, model_name, model, with_usage_chunk=with_usage_chunk)
        self._echoes = dict(enumerate(echoes))

    def whole(self, choices: Sequence[CollectedChoice], usage: Usage) -> dict[str, Any]:
        rendered = [
            self._choice(index, choice.text, choice.logprobs, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._base, "object": "text_completion", "choices": rendered, "usage": usage_json(usage)}

    def chunks(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        yield self._chunk(self._choice(delta.choice_index, delta.text, delta.logprobs, delta.finish_reason))

    def _choice(
        self, index: int, text: str, entries: Sequence[TextLogprobs], finish_reason: str | None
    ) -> dict[str, Any]:
        """Return a choice or a part of it. The first part begins with the echo."""
        echo = self._echoes.get(index, PromptEcho())
        logprobs = _completion_logprobs(entries, len(echo.text))
        if index not in self._begun:
            self._begun.add(index)
            text = echo.text + text
            logprobs = _echoed(echo, logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _message(choice: CollectedChoice, *, with_thinking: bool) -> dict[str, Any]:
    """Return the message of a choice. `content` is null if the choice has only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thinking and with_thinking:
        message["reasoning_content"] = choice.thinking
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _chat_choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(entries: Sequence[TextLogprobs]) -> dict[str, Any] | None:
    if not entries:
        return None
    content = [
        {**_chat_token(entry.chosen), "top_logprobs": [_chat_token(token) for token in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _completion_logprobs(entries: Sequence[TextLogprobs], num_before: int) -> CompletionLogprobs | None:
    """Return OpenAI's older format, four parallel lists. `num_before` characters precede the entries' text."""
    if not entries:
        return None
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [_finite(entry.chosen.logprob) for entry in entries],
        "top_logprobs": [{token.text: _finite(token.logprob) for token in entry.top} or None for entry in entries],
        "text_offset": [num_before + entry.text_offset for entry in entries],
    }


def _echoed(echo: PromptEcho, answer: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Return the lists of the prompt's tokens, followed by the answer's."""
    if echo.logprobs is None:
        return answer
    first: CompletionLogprobs = {
        "tokens": [echo.first_token],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    parts = [part for part in (first, _completion_logprobs(echo.logprobs, 0), answer) if part is not None]
    return {
        "tokens": [each for part in parts for each in part["tokens"]],
        "token_logprobs": [each for part in parts for each in part["token_logprobs"]],
        "top_logprobs": [each for part in parts for each in part["top_logprobs"]],
        "text_offset": [each for part in parts for each in part["text_offset"]],
    }


def usage_json(usage: Usage) -> UsageObject:
    shown: UsageObject = {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if usage.num_thinking_tokens:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.num_thinking_tokens}
    if usage.microneurons is not None:
        shown["neurons"] = usage.microneurons / 1e6
    return shown


def _finite(logprob: float) -> float:
    return max(logprob, _SMALLEST_LOGPROB)
