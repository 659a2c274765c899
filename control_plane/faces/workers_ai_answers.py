"""How does a native Workers AI answer look, whole and streamed?"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from control_plane.faces.answers import Answer, collect, usage_json
from control_plane.faces.streaming import DONE

_FILLER = "abcdefghijklmnopqrstuvwxyz0123456789"


async def whole_result(answer: Answer) -> dict[str, Any]:
    """Read `answer` to its end and return what `AI.run` resolves to."""
    (choice,) = await collect(answer)
    return {"response": choice.text, "tool_calls": [], "finish_reason": choice.finish_reason, **_usage(answer)}


async def frames(answer: Answer) -> AsyncIterator[bytes]:
    """Yield the native stream: one event per piece of text, one with the usage, [DONE]."""
    finish_reason = None
    async for delta in answer:
        finish_reason = delta.finish_reason or finish_reason
        if delta.text:
            yield _frame({"response": delta.text, "p": _filler()})
    yield _frame({"response": "", "finish_reason": finish_reason, **_usage(answer)})
    yield DONE


def _usage(answer: Answer) -> dict[str, Any]:
    return {"usage": usage_json(answer.usage)}


def _filler() -> str:
    """Return characters of random number: an eavesdropper on TLS sees lengths, and lengths give tokens away."""
    return _FILLER[: 1 + secrets.randbelow(len(_FILLER))]


def _frame(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
