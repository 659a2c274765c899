"""What came of an answer so far, and how fast?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Answer:
    """One answer as it grows; made when its question is sent."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first: float | None = None
        self._last = self._asked
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        """Take a piece and return it as it can be shown, kept and sent: half a surrogate pair has no UTF-8."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
        self._pieces.append(piece.encode("utf-8", errors="replace").decode())
        return self._pieces[-1]

    def facts(self, usage: Mapping[str, Any] | None, finish_reason: str | None) -> str:
        """Return the line below an answer; what the server did not count is left out."""
        return " · ".join([*_tokens(usage or {}, finish_reason), *self._pace(usage or {})])

    def _pace(self, usage: Mapping[str, Any]) -> list[str]:
        """Decode's rate is that of the tokens after the first, which is prefill's."""
        if self._first is None:
            return []
        num_tokens, seconds = usage.get("completion_tokens") or 0, self._last - self._first
        rate = [f"{(num_tokens - 1) / seconds:.1f} tokens/s"] if num_tokens > 1 and seconds > 0 else []
        return [*rate, f"TTFT {1000 * (self._first - self._asked):.0f} ms"]


def _tokens(usage: Mapping[str, Any], finish_reason: str | None) -> list[str]:
    if "completion_tokens" not in usage:
        return []
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return [
        f"{usage.get('prompt_tokens') or 0:,} prompt tokens ({cached:,} cached)",
        f"{usage['completion_tokens']:,} new" + (", cut: raise --max-tokens" if finish_reason == "length" else ""),
    ]
