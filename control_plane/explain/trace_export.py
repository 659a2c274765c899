"""Turns kept explanations into lines of a trace in Mooncake's form, without a text and without a hash.

Hashes, accounts and sessions become numbers in the order in which they first appear. What happened is beside each
request, under `tandem`, so that a simulated answer can be compared with the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from control_plane.explain.prompt_blocks import SAMPLE_TOKENS, PromptBlocks

_TEXT_OPERATIONS = frozenset({"chat", "text_completion"})


class TraceLines:
    """Writes requests in the order in which they came; counts those that a trace cannot have."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self._start_ms: int | None = None
        self._numbers: dict[bytes, int] = {}
        self._accounts: dict[str, int] = {}
        self._sessions: dict[str, int] = {}
        self._num_unknown = 0

    def lines(self, explanations: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Yield a line for each explanation of a prompt that was answered."""
        for explained in explanations:
            entry = self._entry(explained)
            if entry is None:
                self.num_left_out += 1
            else:
                yield json.dumps(entry)

    def _entry(self, explained: Mapping[str, Any]) -> dict[str, Any] | None:
        usage = explained["usage"]
        num_prompt_tokens, num_answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if explained["operation"] not in _TEXT_OPERATIONS or not num_prompt_tokens or not num_answer_tokens:
            return None
        self._start_ms = explained["started_ms"] if self._start_ms is None else self._start_ms
        admission = explained.get("admission")
        session = explained.get("session", "")  # explanations of earlier releases have none
        return {
            "timestamp": explained["started_ms"] - self._start_ms,
            "input_length": num_prompt_tokens,
            "output_length": num_answer_tokens,
            "hash_ids": self._hash_ids(explained.get("prompt_blocks"), num_prompt_tokens),
            "session": f"session-{self._sessions.setdefault(session, len(self._sessions))}" if session else "",
            "model": explained["model"],
            "account": f"account-{self._accounts.setdefault(explained['account'], len(self._accounts))}",
            "service_tier": admission["service_class"] if admission else "default",
            "tandem": _outcome(explained),
        }

    def _hash_ids(self, sampled: Mapping[str, Any] | None, num_prompt_tokens: int) -> list[int]:
        """Return a number for each full block; blocks that nobody has noted are like no other."""
        known = PromptBlocks.from_json(sampled).hashes if sampled and sampled["num_tokens"] == SAMPLE_TOKENS else []
        num_blocks = num_prompt_tokens // SAMPLE_TOKENS
        ids = [self._numbers.setdefault(each, len(self._numbers)) for each in known[:num_blocks]]
        num_unknown = num_blocks - len(ids)
        first = -1 - self._num_unknown
        self._num_unknown += num_unknown
        return [*ids, *range(first, first - num_unknown, -1)]


def _outcome(explained: Mapping[str, Any]) -> dict[str, Any]:
    """Return what happened, and what the router expected of it."""
    route = explained["route"] or {}
    chosen = [each for each in route.get("candidates", ()) if each["is_chosen"]]
    role = "prefill" if route.get("mode") == "handed_over" else "decode"
    cached: dict[str, int] = next((each["cached_tokens"] for each in chosen if each["role"] == role), {})
    return {
        "state": explained["state"],
        "ttft_ms": explained["ttft_ms"],
        "duration_ms": explained["duration_ms"],
        "mode": route.get("mode"),
        "prefill": explained["prefill"],
        "decode": explained["decode"],
        "predicted_ms": route.get("predicted_ms", {}),
        "predicted_cached_tokens": sum(cached.values()),
        "cached_tokens": explained["usage"]["cached_tokens"],
    }
