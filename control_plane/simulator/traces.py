"""Reads and writes traces of requests, and changes their arrivals.

The form is Mooncake's: a JSON object per line with `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one for each block of the prompt. A hash id stands for a block and all blocks before it, so two prompts that
begin with the same ids begin with the same tokens. Tandem adds optional fields: `block_tokens` (512 if absent),
`max_tokens`, `session`, `model`, `account`, `service_tier`, and `after` with `gap_ms`: the request is sent that long
after an earlier line's answer, and never before its own timestamp. Azure's CSV (timestamp, context tokens, generated
tokens) is read too, without shared prefixes.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
_LEAST_MAX_TOKENS = 1024
"""What a client of a trace without `max_tokens` asks for, or its answer's length if that is more."""
_NAMES = ("model", "account", "service_tier")
_MAX_TOKENS_OF_ONE = 10_000_000


class BadTrace(ValueError):
    """A trace cannot be read; the message names the line and the remedy."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    number: int
    """Its place in the trace."""
    arrival: float
    """Seconds since the trace's beginning; the earliest if `after` is given."""
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    max_tokens: int = 0
    session: str = ""
    after: int | None = None
    """Number of the request whose answer this one follows."""
    gap_seconds: float = 0.0
    model: str = ""
    account: str = ""
    service_tier: str = ""
    """As clients name it; "": none."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt_tokens <= _MAX_TOKENS_OF_ONE or self.num_output_tokens < 1:
            raise ValueError(f"{self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens")
        if self.after is not None and not 0 <= self.after < self.number:
            raise ValueError(f"request {self.number} follows request {self.after}; only an earlier one is possible")

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The hash ids of blocks that are full: only those can be cached."""
        return self.hash_ids[: self.num_prompt_tokens // self.block_tokens]

    @property
    def requested_tokens(self) -> int:
        """The most tokens that the client asks for."""
        return max(self.max_tokens or _LEAST_MAX_TOKENS, self.num_output_tokens)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read Mooncake's JSON lines, or Azure's CSV if the name ends so; raises BadTrace."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            return list(itertools.islice(_azure(lines), limit))
        return list(itertools.islice(_mooncake(lines), limit))


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    number = 0
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _request_of(json.loads(line), number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadTrace(
                f"line {place} is not a request of a Mooncake trace ({type(error).__name__}: {error}); an object with "
                "timestamp, input_length, output_length and hash_ids is wanted"
            ) from error
        number += 1


def _request_of(entry: dict[str, Any], number: int) -> TraceRequest:
    after = entry.get("after")
    return TraceRequest(
        number,
        entry["timestamp"] / 1000,
        max(1, int(entry["input_length"])),
        max(1, int(entry["output_length"])),
        tuple(map(int, entry["hash_ids"])),
        int(entry.get("block_tokens", BLOCK_TOKENS)),
        int(entry.get("max_tokens", 0)),
        str(entry.get("session", "")),
        None if after is None else int(after),
        float(entry.get("gap_ms", 0)) / 1000,
        *(str(entry.get(name, "")) for name in _NAMES),
    )


def _azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    start: float | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            start = moment if start is None else start
            lengths = max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
            yield TraceRequest(number, moment - start, *lengths)
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"row {number + 2} is not of Azure's trace of LLM inference: {error}") from error


def line_of(request: TraceRequest) -> str:
    """Return a request as a line of a trace."""
    entry: dict[str, Any] = {
        "timestamp": round(1000 * request.arrival, 3),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": request.hash_ids,
    }
    optional = {
        "block_tokens": request.block_tokens if request.block_tokens != BLOCK_TOKENS else None,
        "max_tokens": request.max_tokens or None,
        "session": request.session or None,
        "after": request.after,
        "gap_ms": round(1000 * request.gap_seconds, 3) or None,
        **{name: getattr(request, name) or None for name in _NAMES},
    }
    return json.dumps(entry | {name: value for name, value in optional.items() if value is not None})


def part_of(trace: Sequence[TraceRequest], first: int, number: int) -> list[TraceRequest]:
    """Return `number` requests from request `first` on, from time 0 on; those that follow a lost one stand alone."""
    chosen = trace[first : first + number]
    if not chosen:
        return []
    numbers = {request.number: place for place, request in enumerate(chosen)}
    start = min(request.arrival for request in chosen)
    return [
        replace(
            request,
            number=place,
            arrival=request.arrival - start,
            after=None if request.after is None else numbers.get(request.after),
        )
        for place, request in enumerate(chosen)
    ]


def jittered(trace: Sequence[TraceRequest], seconds: float, rng: random.Random) -> list[TraceRequest]:
    """Move each arrival by a random time of up to `seconds`, in order again: bursts of coarse clocks are spread."""
    moved = [replace(request, arrival=request.arrival + rng.uniform(0, seconds)) for request in trace]
    moved.sort(key=lambda request: (request.arrival, request.number))
    numbers = {request.number: place for place, request in enumerate(moved)}
    placed = [
        replace(request, number=place, after=None if request.after is None else numbers[request.after])
        for place, request in enumerate(moved)
    ]
    return [
        replace(request, after=None) if request.after is not None and request.after > request.number else request
        for request in placed
    ]


def sped_up(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Divide all arrivals, and the gaps after answers, by `factor`."""
    return [
        replace(request, arrival=request.arrival / factor, gap_seconds=request.gap_seconds / factor)
        for request in trace
    ]
