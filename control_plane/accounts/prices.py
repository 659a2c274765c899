"""Prices requests in neurons, Cloudflare's unit: 1,000 neurons are 0.011 US dollars.

A price has three parts, each per million tokens: computed prompt tokens, cached prompt tokens, answer tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from control_plane.generation import Usage
from tandem_runtime.model_table import ModelTable

DOLLARS_PER_NEURON = 0.000011
DEFAULT_PRICES = ("*=0.1/0.02/0.3",)


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens."""

    input: float
    cached_input: float
    output: float

    def microneurons(self, usage: Usage) -> int:
        """Return the price in millionths of a neuron. It is an integer, so that sums over rows are exact."""
        dollars_per_million = (
            usage.num_computed_tokens * self.input
            + usage.num_cached_tokens * self.cached_input
            + usage.num_completion_tokens * self.output
        )
        return round(dollars_per_million / DOLLARS_PER_NEURON)


FREE = Price(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class PriceTable:
    by_model: Mapping[str, Price] = field(default_factory=dict)
    others: Price = FREE
    models: ModelTable | None = None
    """The tables of tandem.toml and of the package, for models that are not in `by_model`."""

    @classmethod
    def parse(cls, entries: Iterable[str]) -> PriceTable:
        """Read `MODEL=INPUT/CACHED/OUTPUT`, `*` for all others. Raise ValueError naming the problem."""
        prices: dict[str, Price] = {}
        for entry in entries:
            model, price = _parse(entry)
            if model in prices:
                raise ValueError(f"prices has {model!r} twice; give one price per model")
            prices[model] = price
        return cls(prices, prices.pop("*", FREE))

    def over(self, models: ModelTable) -> PriceTable:
        """Return this table, with the prices of `models` for models that it does not have."""
        return replace(self, models=models)

    def of(self, model: str) -> Price:
        """Return the price of a model, by the id that its worker serves."""
        if model in self.by_model:
            return self.by_model[model]
        names = (model, *self.models.names_of(model)) if self.models else ()
        entries = (self.models.find(name) for name in names) if self.models else ()
        prices = next((entry.prices for entry in entries if entry and entry.prices), None)
        return Price(**asdict(prices)) if prices else self.others


def _parse(entry: str) -> tuple[str, Price]:
    model, _, parts = entry.rpartition("=")
    try:
        dollars = [float(part) for part in parts.split("/")]
    except ValueError:
        dollars = []
    if not model or len(dollars) != 3 or not all(0 <= each < 1e6 for each in dollars):
        raise ValueError(
            f"prices has {entry!r}, which is not a price; write MODEL=INPUT/CACHED/OUTPUT, US dollars per million "
            "tokens, such as @tandem/demo=0.1/0.02/0.3, and * for all other models"
        )
    return model, Price(*dollars)
