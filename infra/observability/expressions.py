"""Pieces of PromQL that several rules and panels share."""

from __future__ import annotations

from control_plane.dispatch.admission import Quarantined
from control_plane.dispatch.request_state import Diverged
from control_plane.dispatch.stall_watch import Stalled
from control_plane.drain import GatewayDraining
from infra.observability.pace import Pace
from tandem_runtime.errors import STATUSES, TandemError
from tandem_runtime.metrics import SECONDS

_OF_GATEWAYS: tuple[type[TandemError], ...] = (Diverged, GatewayDraining, Quarantined, Stalled)
"""Errors that only a gateway raises, and that end requests."""


def boundary(seconds: float) -> str:
    """Return the `le` of the first bucket that ends at `seconds` or above it."""
    return str(next(bound for bound in SECONDS if bound >= seconds))


def faults() -> list[str]:
    """Return the names of the errors that count against the error budget: the caller is not their cause.

    A full queue (429, Overloaded) is ours. So is a deadline that passed (504). A wrong request and a caller who left
    are not, nor is an account that has used up its limits.
    """
    shared = [
        kind for kind in _tree(TandemError) if kind is not TandemError and kind.__module__ == TandemError.__module__
    ]
    kinds: list[type[TandemError]] = [*shared, *_OF_GATEWAYS]
    return sorted(kind.__name__ for kind in kinds if (status := STATUSES[kind.code][1]) == 429 or status >= 500)


def _tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


FAULTS = "|".join(faults())


def by_model(expression: str) -> str:
    """Sum by the model that answered, under the name `model`."""
    renamed = f'label_replace({expression}, "model", "$1", "gen_ai_response_model", "(.*)")'
    return f"sum by (model) ({renamed})"


def share(part: str, whole: str, window: str) -> str:
    """Return the rate of `part` as a share of the rate of `whole`, by model."""
    return f"{by_model(f'rate({part}[{window}])')} / {by_model(f'rate({whole}[{window}])')}"


def increase_by(counter: str, pace: Pace) -> str:
    """Return the increase of each series of a counter in the event window, also of a series that has begun in it.

    `increase` does not see the first value of a series, and most counters of faults begin with their first fault. A
    series is new if it was not there before the window. It is not new after a scrape that failed.
    """
    window, memory = pace.event_window, pace.memory
    earlier = f"last_over_time({counter}[{memory}] offset {window})"
    return f"(increase({counter}[{window}]) > 0 or ({counter} unless {earlier}) > 0)"


def quantile(q: float, histogram: str, labels: str, window: str, by: str = "model") -> str:
    """Return a quantile of a histogram; `labels` are matchers, with commas between them."""
    buckets = f"{histogram}_bucket{{{labels}}}" if labels else f"{histogram}_bucket"
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({buckets}[{window}])))"
