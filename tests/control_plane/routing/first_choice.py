"""Chance that never surprises, for tests of everything else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


class FirstChoice(random.Random):
    """Takes the first of several, and of weighted ones the first of the heaviest."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def choices(self, population: Any, weights: Sequence[Any] | None = None, **_: Any) -> list[Any]:
        weighed = zip(population, weights or [1] * len(population), strict=True)
        return [max(weighed, key=lambda pair: pair[1])[0]]
