"""Makes the requests of a hostile client: bounded sizes, the same bytes for the same seed.

A `Kind` is a function of a `Maker`, which knows the sender's token, the models, and how long a body may become. The
function returns what each connection of the kind sends. A kind may be refused or permitted: the measurement asks only
that the sender gets an answer and that nobody else notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hostile.exchange import Script, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HEAD_SECONDS = 10.0
"""How long a head may take (`--head-seconds`)."""
BODY_STALL_SECONDS = 10.0
"""How long a body may not move (`--body-stall-seconds`)."""
BODY_RATE_SECONDS = 20.0
"""When a body that moves too slowly must have been refused: the rate counts after its first 10 s."""


@dataclass
class Maker:
    """Makes bodies of at most `max_body_bytes`."""

    token: str
    model: str
    large_model: str
    """A model that nobody used before, with a vocabulary of 128k tokens."""
    account: str
    max_body_bytes: int
    chance: random.Random = field(default_factory=lambda: random.Random(14))

    def fill(self, item_bytes: float, share: float = 1.0) -> int:
        """Return how many items of that size fill a share of the largest body."""
        return max(1, int(self.max_body_bytes * share / item_bytes))

    def chat(self, messages: Any = None, **fields: Any) -> Sequence[Script]:
        body = {"model": self.model, "messages": messages or [user("hello")], "max_tokens": 1, **fields}
        return [Script([post(CHAT, body, self.token)])]

    def completion(self, prompt: Any = "hello", **fields: Any) -> Sequence[Script]:
        return [
            Script([post(COMPLETIONS, {"model": self.model, "prompt": prompt, "max_tokens": 1, **fields}, self.token)])
        ]

    def raw_chat(self, middle: str, **headers: str) -> Sequence[Script]:
        """A chat whose body has `middle`, JSON or not, behind its model."""
        body = f'{{"model":"{self.model}","max_tokens":1,{middle}}}'.encode("utf-8", "surrogatepass")
        return [Script([post(CHAT, body, self.token, headers)])]

    def native(self, body: dict[str, Any]) -> Sequence[Script]:
        path = f"/client/v4/accounts/{self.account}/ai/run/{self.model}"
        return [Script([post(path, body, self.token)])]


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[Maker], Sequence[Script]]
    limit_seconds: float = 0.0
    """When the limit that it breaks is broken, after its first byte; 0: with its last byte."""
    part: str = "bodies"


class Kinds(dict[str, Kind]):
    """The kinds of one part of the measurement by name."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def kind(self, limit_seconds: float = 0.0) -> Callable[[Callable[[Maker], Sequence[Script]]], Any]:
        """Add the decorated function, under its name."""

        def add(make: Callable[[Maker], Sequence[Script]]) -> Callable[[Maker], Sequence[Script]]:
            name = make.__name__.removeprefix("_")
            self[name] = Kind(name, make, limit_seconds, self._part)
            return make

        return add


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def words(num_bytes: int, chance: random.Random) -> str:
    """Return ordinary text: words of 2 to 9 letters."""
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    vocabulary = ["".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(2, 9))) for _ in range(2000)]
    text = " ".join(chance.choices(vocabulary, k=num_bytes // 6 + 2))
    return (text * 2)[: max(1, num_bytes)]
