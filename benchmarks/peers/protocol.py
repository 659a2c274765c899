"""The protocol of a process that holds one engine: one JSON object per line. Standard library only.

    load     {model, vocab_size, num_threads, cpus, max_batch, max_context,
              kv_bytes_per_token, settings}                                                  -> {}
    prefill  {num_tokens, seed}       one prompt from an empty cache, one token out      -> {seconds}
    hold     {batch, num_tokens}      requests whose prompts are computed, then wait     -> {}
    decode   {num_steps}              all held requests go on, greedy, that many steps   -> {seconds: [of each step]}
    release  {}                       forget the held requests                           -> {}

Nothing runs between two orders: an engine that waits leaves the cores to the one that is measured. What goes wrong is
answered with {error}. The end of standard input ends the process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_TOKEN_ID = 10
"""Prompts leave out what a tokenizer keeps for itself."""


@dataclass(frozen=True)
class Load:
    """What an engine is to be loaded with."""

    model: str
    """A folder or file, as this engine wants it."""
    vocab_size: int
    num_threads: int
    max_batch: int
    max_context: int
    """Tokens per request, prompt and answer."""
    kv_bytes_per_token: int
    """Bytes of keys and values of all layers in float32, for engines configured in bytes."""
    settings: Mapping[str, Any]


class Engine(Protocol):
    """One engine in this process. Imports nothing heavy before `load`: the affinity is set by then."""

    def load(self, what: Load) -> None: ...

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds from a prompt to its first token, with nothing else to do and nothing cached."""
        ...

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute all prompts and a first token of each, and stop."""
        ...

    def decode(self, num_steps: int) -> list[float]:
        """Go on with what is held and return the seconds of each step; one more before them is not counted."""
        ...

    def release(self) -> None: ...


def serve(engine: Engine) -> None:
    """Answer orders until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hands = _Hands(engine)
    for line in sys.stdin:
        try:
            answer = hands.carry_out(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the caller receives every error
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # some libraries' threads do not end by themselves


def prompt_ids(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return a prompt of random tokens, always the same for a seed; two seeds share no beginning worth caching."""
    chance = random.Random(seed)
    return [chance.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_tokens)]


class _Hands:
    """Turns orders into calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocab_size = 0

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        match order.pop("do"):
            case "load":
                os.sched_setaffinity(0, order.pop("cpus"))
                self._vocab_size = order["vocab_size"]
                self._engine.load(Load(**order))
            case "prefill":
                prompt = prompt_ids(order["num_tokens"], self._vocab_size, order["seed"])
                return {"seconds": self._engine.prefill(prompt)}
            case "hold":
                seeds = range(1_000_000, 1_000_000 + order["batch"])
                self._engine.hold([prompt_ids(order["num_tokens"], self._vocab_size, seed) for seed in seeds])
            case "decode":
                return {"seconds": self._engine.decode(order["num_steps"])}
            case "release":
                self._engine.release()
            case unknown:
                raise ValueError(f"no such order: {unknown}")
        return {}
