"""The times that a model's answers should keep: the wait for their turn, and for each token after the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_BUDGETS = ("*=10/0.25",)
"""Ten seconds until a request's turn, and four tokens a second, about the speed of reading."""


@dataclass(frozen=True)
class Budget:
    """Seconds; None: no bound."""

    wait_seconds: float | None = None
    """Until a request's turn. It may be predicted to wait for a part of that (`SURE`), and wait for 0.9 of it."""
    token_seconds: float | None = None
    """For each token after the first: a worker whose answers would be slower gets no more of them."""


NO_BUDGET = Budget()


@dataclass(frozen=True)
class BudgetTable:
    by_model: Mapping[str, Budget]
    others: Budget = NO_BUDGET

    @classmethod
    def parse(cls, entries: Sequence[str]) -> BudgetTable:
        """Return the budgets of entries such as `MODEL=10/0.25`; `*` for all others. Raise ValueError."""
        budgets: dict[str, Budget] = {}
        for entry in entries:
            model, equals, times = entry.rpartition("=")
            wait, slash, token = times.partition("/")
            if not model or not equals or not slash:
                raise ValueError(_wrong(entry))
            if model in budgets:
                raise ValueError(f"budgets names {model!r} twice; keep one entry")
            budgets[model] = Budget(_seconds(wait, entry), _seconds(token, entry))
        return cls(budgets, budgets.pop("*", NO_BUDGET))

    def of(self, model_id: str) -> Budget:
        return self.by_model.get(model_id, self.others)


def _seconds(text: str, entry: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(_wrong(entry)) from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(_wrong(entry))
    return seconds or None


def _wrong(entry: str) -> str:
    return (
        f"budgets has {entry!r}; write MODEL=FIRST/NEXT, the seconds until a request's turn and those for each token "
        "after the first, 0 for no bound, and * for all other models"
    )
