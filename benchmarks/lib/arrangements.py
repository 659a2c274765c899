"""Defines the arrangements that are compared on one machine, and their workloads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrangement:
    """One way of dividing this machine, as flags of `tandem up` and settings in its environment."""

    name: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """The workers that must be ready before anything is measured."""
        return ("decode", "kv", "prefill") if self.hands_over else ("decode",)

    @property
    def num_workers(self) -> int:
        return 2 if self.hands_over else 1

    @property
    def hands_over(self) -> bool:
        return "--prefill" not in self.flags


@dataclass(frozen=True)
class Workload:
    """Requests of one size; `concurrency` of them are under way at any time."""

    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    num_rounds: int
    """In each round every arrangement gets the same `round_size` requests, one arrangement after the other."""
    num_warm_ups: int = 3
    """Requests to each arrangement before the first round, not counted; as many as are under way at least."""

    @property
    def seed(self) -> int:
        """Of its prompts: those of another size must not begin like these, a cache would find them."""
        return 10_000 * self.num_prompt_tokens + self.concurrency

    @property
    def round_size(self) -> int:
        return 1 if self.concurrency == 1 else 2 * self.concurrency


QUICK = (Workload(num_prompt_tokens=128, num_output_tokens=16, concurrency=1, num_rounds=6),)
SMALL_MODEL = (
    Workload(num_prompt_tokens=256, num_output_tokens=64, concurrency=1, num_rounds=24),
    Workload(num_prompt_tokens=256, num_output_tokens=64, concurrency=8, num_rounds=2),
)
LARGE_MODEL = (
    Workload(num_prompt_tokens=256, num_output_tokens=32, concurrency=1, num_rounds=8),
    Workload(num_prompt_tokens=256, num_output_tokens=32, concurrency=4, num_rounds=1),
)


def one_core_each() -> list[Arrangement]:
    """Return disaggregated, with one core for prefill and one for decode, and aggregated on one core.

    A decode step takes as long in the one as in the other: what differs is the hand-over.
    """
    cores = _own_cores()
    if len(cores) < 2:
        raise RuntimeError("a hand-over is measured between two cores; this process may use one, give it another")
    pinned = {
        role: {f"TANDEM_{role}_CPUS": str(core), f"TANDEM_{role}_NUM_THREADS": "1"}
        for role, core in zip(("PREFILL", "DECODE"), cores, strict=False)
    }
    threads = {"OMP_NUM_THREADS": "1"}
    return [
        Arrangement("disaggregated", (), {**pinned["PREFILL"], **pinned["DECODE"], **threads}),
        Arrangement("aggregated", ("--prefill", "0"), {**pinned["DECODE"], **threads}),
    ]


@contextmanager
def beside_prefill() -> Iterator[None]:
    """Run this process, and what it starts meanwhile, on prefill's core of `one_core_each`; engines go where told."""
    cores = set(_own_cores())
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def arrangements(num_cores: int, *, only_pair: bool) -> list[Arrangement]:
    """Return disaggregated and aggregated on the whole machine; and aggregated on as many cores as prefill alone has.

    The first two ask what the machine is best used for; the third, what the hand-over itself costs.
    """
    pair = [Arrangement("disaggregated"), Arrangement("aggregated", ("--prefill", "0"))]
    cores = _own_cores()
    if only_pair or num_cores < 2 or len(cores) < 2:
        return pair
    half = cores[: (num_cores + 1) // 2]
    environment = {
        "TANDEM_DECODE_CPUS": ",".join(map(str, half)),
        "TANDEM_DECODE_NUM_THREADS": str(len(half)),
        "OMP_NUM_THREADS": str(len(half)),
    }
    return [*pair, Arrangement("aggregated_half", ("--prefill", "0"), environment)]


def _own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
