"""Defines the parts of the kit, and what a process that runs some of them has to offer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_kit.form import FORMS, Form

Figures = dict[str, Any]
"""Names with numbers, texts, booleans, or lists and objects of them: what JSON can hold."""
State = Literal["done", "failed", "left_out"]


class LeftOut(Exception):
    """A part cannot be measured on this machine; the message is the reason."""


class MissingFlag(Exception):
    """A part needs a flag that this checkout does not have."""


@dataclass(frozen=True)
class Part:
    """One part, run by the module `hands` in a process that it shares with its neighbours of the same module."""

    name: str
    title: str
    hands: str
    budget_seconds: float


@dataclass(frozen=True)
class Result:
    """What became of a part."""

    state: State
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    reason: str = ""
    """Why the part failed or was left out."""
    log: str = ""
    """The end of what the process of a failed part, and the Tandem that it had started, have written."""


@dataclass(frozen=True)
class Settings:
    """What every process of the kit is told."""

    device: str
    """cpu, or cuda:0: the card is chosen by CUDA_VISIBLE_DEVICES."""
    form_name: str
    folder: Path
    """For models, logs and state; removed after the run."""

    @property
    def form(self) -> Form:
        return FORMS[self.form_name]

    @property
    def is_on_card(self) -> bool:
        return self.device != "cpu"


Run = Callable[[Any], Awaitable[Figures]]
"""Runs one part with what its module's `open_rig` yields."""
Runs = Mapping[str, Run]

_ENGINE = "benchmarks.gpu_kit.engine_parts"
_FLEET = "benchmarks.gpu_kit.fleet_parts"
PARTS = (
    Part("card", "card, driver, versions", _ENGINE, 60),
    Part("limits", "limits of the card", _ENGINE, 60),
    Part("parity_demo", "greedy tokens of the built-in model against the CPU", _ENGINE, 90),
    Part("parity_random", "greedy tokens of a random Llama against the CPU", _ENGINE, 150),
    Part("determinism", "the same requests twice, alone and in batches", _ENGINE, 60),
    Part("decode", "decode against transformers' continuous batching", _ENGINE, 120),
    Part("prefill", "prefill against transformers' continuous batching", _ENGINE, 60),
    Part("sampling", "top-p against greedy", _ENGINE, 90),
    Part("overlap", "steps planned ahead against steps one by one", _ENGINE, 60),
    Part("hand_over", "prefill and decode on one card, KV through the host", _FLEET, 180),
    Part("host_memory", "host memory of a worker", _FLEET, 90),
    Part("kill", "kill -9 of the prefill worker among requests", _FLEET, 150),
    Part("hand_over_ring", "prompts larger than the staging ring", _FLEET, 120),
    Part("hand_over_device", "prefill and decode on one card, KV in the card's memory", _FLEET, 150),
)
"""In the order of their run. `card` comes first: without a card nothing else is tried."""
