"""Types of `inputs` for editors and type checkers. At run time, any mapping is sent unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class _Inputs(TypedDict, total=False):
    """Text generation takes `prompt` or `messages`."""

    prompt: str
    messages: Sequence[Mapping[str, Any]]
    raw: bool
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    stop: str | Sequence[str] | None
    response_format: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    options: Mapping[str, Any]
    cache_salt: str
    prompt_cache: Literal["on", "read", "write", "off"]
    prompt_cache_tokens: int


class WholeInputs(_Inputs, total=False):
    """Inputs of a call that returns a dict."""

    stream: Literal[False]


class StreamedInputs(_Inputs, total=False):
    """Inputs of a call that returns an iterator of tokens."""

    stream: Required[Literal[True]]
