"""Makes the requests of a load: who asks for what, when, and at which gateway; the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from control_plane.simulator.traces import TraceRequest

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Account:
    share: float
    """Of the requests."""
    gateways: tuple[int, ...] | None = None
    """Where it asks, at random; None: at all."""


ACCOUNTS: Mapping[str, Account] = {"greedy": Account(0.8), "small": Account(0.1, (0,)), "other": Account(0.1)}
"""The greedy one asks at every gateway, and the small one at one only."""


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens are uniform between the two numbers."""

    prompt: tuple[int, int]
    answer: tuple[int, int]

    @property
    def mean_prompt(self) -> float:
        return sum(self.prompt) / 2

    @property
    def mean_answer(self) -> float:
        return sum(self.answer) / 2


@dataclass(frozen=True)
class Arrivals:
    """The requests of one load, in order; `gateways` has the place of each one's gateway."""

    requests: Sequence[TraceRequest]
    gateways: Sequence[int]


def arrivals(
    per_second: float, seconds: float, sizes: Sizes, models: Sequence[str], num_gateways: int, seed: str
) -> Arrivals:
    """Return Poisson arrivals of so many requests a second; their gateways alone depend on how many there are."""
    rng, placing, now = random.Random(seed), random.Random(f"{seed}/gateways"), 0.0
    requests: list[TraceRequest] = []
    gateways: list[int] = []
    names, weights = list(ACCOUNTS), [account.share for account in ACCOUNTS.values()]
    while (now := now + rng.expovariate(per_second)) < seconds:
        (name,) = rng.choices(names, weights)
        allowed = ACCOUNTS[name].gateways
        gateways.append(placing.choice(range(num_gateways) if allowed is None else allowed))
        requests.append(_drawn(rng, len(requests), now, sizes, models, name))
    return Arrivals(requests, gateways)


def at_once(num_each: int, sizes: Sizes, models: Sequence[str], num_gateways: int, first: int) -> Arrivals:
    """Return so many requests of each model, all at the beginning, at the gateways by turns.

    `first`: the number of the first one, and the seed.
    """
    rng, names = random.Random(first), [model for _ in range(num_each) for model in models]
    requests = [_drawn(rng, first + place, 0.0, sizes, (name,), "calibration") for place, name in enumerate(names)]
    return Arrivals(requests, [place // len(models) % num_gateways for place in range(len(names))])


def _drawn(
    rng: random.Random, number: int, at: float, sizes: Sizes, models: Sequence[str], account: str
) -> TraceRequest:
    prompt, answer = rng.randint(*sizes.prompt), rng.randint(*sizes.answer)
    return TraceRequest(
        number,
        at,
        prompt,
        answer,
        block_tokens=BLOCK_TOKENS,
        max_tokens=answer,
        model=rng.choice(models),
        account=account,
    )
