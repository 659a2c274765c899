"""The streams of a rolling upgrade: what is asked, and what a client sees of each."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Kind = Literal["greedy", "seeded", "constrained"]
KINDS: tuple[Kind, ...] = ("greedy", "seeded", "constrained")
_WORDS = ("cache", "block", "token", "worker", "prompt", "answer", "model", "layer", "reads", "finds", "keeps", "moves")
_PATTERN = "([a-z]{1,9} ){300}"
"""More words than any answer has tokens: only the number of tokens ends it."""


@dataclass(frozen=True)
class Ask:
    """One request; the same one always has the same answer within a numerics class."""

    kind: Kind
    prompt: str
    num_tokens: int
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0 if self.kind == "greedy" else 0.8,
            "seed": self.seed,
        }
        return body | ({"guided_regex": _PATTERN} if self.kind == "constrained" else {"ignore_eos": True})


def asks(number: int, shortest: int, longest: int, seed: int = 20) -> list[Ask]:
    """Return so many requests of `shortest` to `longest` answer tokens, of every kind."""
    chance = random.Random(seed)
    return [
        Ask(
            KINDS[index % len(KINDS)],
            f"{index}: " + " ".join(chance.choices(_WORDS, k=chance.randint(20, 120))),
            chance.randint(shortest, longest),
            chance.getrandbits(31),
        )
        for index in range(number)
    ]


@dataclass
class Seen:
    """What the client of one stream saw."""

    text: str = ""
    pieces: list[tuple[str, str]] = field(default_factory=list)
    """Fingerprint and text of each event with text."""
    seams: Sequence[Mapping[str, Any]] = ()
    num_tokens: int = 0
    ttft_seconds: float = 0.0
    error: str = ""

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints in the order in which they came, repetitions left out."""
        found: list[str] = []
        for fingerprint, _ in self.pieces:
            if not found or found[-1] != fingerprint:
                found.append(fingerprint)
        return found

    def problem(self, ask: Ask, expected: str) -> str:
        """Return what is wrong with this stream; "" for nothing. `expected`: the text of either class."""
        if self.error:
            return self.error
        if self.num_tokens != ask.num_tokens:
            return f"{self.num_tokens} tokens instead of {ask.num_tokens}"
        if self.text != expected:
            return f"{self.text[:80]!r} ... instead of {expected[:80]!r} ..."
        told = [self.fingerprints[0], *(str(seam["to"]) for seam in self.seams)]
        if self.fingerprints != told:
            return f"its events are of {self.fingerprints}, its seams tell of {told}"
        return ""


async def stream(http: httpx.AsyncClient, ask: Ask, model: str) -> Seen:
    """Stream one answer to its end; an error is noted, never raised."""
    seen, started, is_done = Seen(), time.perf_counter(), False
    try:
        async with http.stream("POST", "/v1/completions", json=ask.body(model)) as response:
            if response.status_code != 200:
                seen.error = f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
                return seen
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    _take(seen, json.loads(line.removeprefix("data: ")), started)
    except httpx.HTTPError as error:
        seen.error = f"{type(error).__name__}: {error}"
    if not is_done and not seen.error:
        seen.error = "the stream ended without [DONE]"
    return seen


def _take(seen: Seen, event: Mapping[str, Any], started: float) -> None:
    if "error" in event:
        seen.error = seen.error or str(event["error"])
        return
    text = "".join(choice["text"] for choice in event["choices"])
    if text:
        seen.ttft_seconds = seen.ttft_seconds or time.perf_counter() - started
        seen.text += text
        seen.pieces.append((event["system_fingerprint"], text))
    seen.seams = event.get("tandem", {}).get("seams", seen.seams)
    seen.num_tokens = (event.get("usage") or {}).get("completion_tokens", seen.num_tokens)
