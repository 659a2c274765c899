"""Records each request that has ended in the gateway's metrics, from its explanation.

Explanation, ledger and metrics have one source, so they agree. The time to a stream's first token is recorded when that
token leaves: an answer may go on for minutes. A request costs some 40 microseconds here, a token nothing.

Labels are bounded: models are ids of served models, causes are names of error classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from control_plane.explain.explanation import Explanation, Move, RouteExplanation, UsageExplanation
from control_plane.explain.journal import Journal
from tandem_runtime import metrics

UNKNOWN_MODEL = "unknown"

_RATIO_BOUNDARIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
_AFTER_THE_ROUTE = ("submit", "worker_queue", "prefill", "transport")
"""Segments from the route to the first token's arrival: what the router predicts."""

Labels = dict[str, str]


class Live(Protocol):
    """The requests that have not ended."""

    def num_by_model(self) -> Mapping[tuple[str, str], int]:
        """Return how many there are by state (queued, running) and model. Called in any thread."""


class RequestMetrics:
    """The instruments of requests. Make one per gateway, after `metrics.configure`. On the event loop."""

    def __init__(self, live: Live | None = None) -> None:
        meter = metrics.meter()

        def seconds(name: str, description: str) -> _Histogram:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=metrics.SECONDS
            )

        self._durations = seconds("gen_ai.server.request.duration", "From the request's arrival to its last token.")
        self._first_tokens = seconds(
            "gen_ai.server.time_to_first_token", "From the request's arrival to its first token leaving."
        )
        self._later_tokens = seconds(
            "gen_ai.server.time_per_output_token", "Mean time of a token after the first, of each request."
        )
        self._waits = seconds("tandem.queue.wait", "Time in the admission queue.")
        self._hand_overs = seconds("tandem.hand_over.duration", "Time of a hand-over from prefill to decode.")
        self._ratios = meter.create_histogram(
            "tandem.route.ttft_ratio",
            unit="1",
            description="Actual / predicted time from the route to the first token.",
            explicit_bucket_boundaries_advisory=_RATIO_BOUNDARIES,
        )
        self._tokens = Tally(meter, "tandem.tokens", "{token}", "Tokens by type.", "model", "type")
        self._refusals = Tally(meter, "tandem.refusals", "{request}", "Requests without an answer.", "cause")
        self._migrations = Tally(
            meter, "tandem.migrations", "{migration}", "Requests that went on at another worker.", "model", "cause"
        )
        self._seams = Tally(
            meter, "tandem.class.seams", "{seam}", "Places where an answer changed its numerics class.", "model"
        )
        self._hand_over_bytes = Tally(
            meter, "tandem.hand_over.size", "By", "KV bytes moved from prefill to decode.", "model", "transport"
        )
        self._decisions = Tally(meter, "tandem.route.decisions", "{request}", "Routes taken.", "model", "mode")
        self._candidates = Tally(
            meter, "tandem.route.candidates", "{worker}", "Workers that were compared for a route.", "model", "role"
        )
        self._predicted = Tally(meter, "tandem.route.predicted_ttft", "s", "Sum of predicted times.", "model")
        self._actual = Tally(meter, "tandem.route.actual_ttft", "s", "Sum of actual times.", "model")
        self._prompt_tokens = Tally(meter, "tandem.cache.prompt_tokens", "{token}", "Prompt tokens.", "model")
        self._expected_tokens = Tally(
            meter, "tandem.cache.predicted_tokens", "{token}", "Prompt tokens expected in caches.", "model"
        )
        self._mispredicted = Tally(
            meter,
            "tandem.cache.mispredicted_tokens",
            "{token}",
            "Prompt tokens that were expected in caches and not found, or the other way round.",
            "model",
            "kind",
        )
        self._hits = Tally(
            meter, "tandem.cache.hit_tokens", "{token}", "Prompt tokens found in caches.", "model", "tier"
        )
        self._begun: set[str] = set()
        """Ids of the requests that run and whose first token is recorded."""
        if live is not None:
            _export_live(meter, live)

    def first_token_left(self, journal: Journal) -> None:
        """Record the time to the first token of a stream; `ended` records that of other answers."""
        ttft = journal.ttft_seconds
        if ttft is None or journal.is_over or journal.request_id in self._begun:
            return
        self._begun.add(journal.request_id)
        self._first_tokens.record(ttft, _labels(journal.operation, journal.requested_model, journal.model))

    def ended(self, explanation: Explanation) -> None:
        """Record a request that has ended, whatever its outcome."""
        summary = explanation.summary
        model = summary.model or UNKNOWN_MODEL
        labels = _labels(summary.operation, explanation.requested_model, model)
        error = {"error.type": summary.error} if summary.error else {}
        self._durations.record(summary.duration_ms / 1000, labels | error)
        self._record_tokens(explanation, labels)
        if summary.state in ("failed", "aborted") and summary.ttft_ms is None:
            self._refusals.add(1, summary.error or "unknown")
        self._count_usage(model, explanation.usage)
        for move in explanation.moves:
            self._record_move(model, move)
        if explanation.route is not None:
            self._record_route(model, explanation, explanation.route)

    def _record_tokens(self, explanation: Explanation, labels: Labels) -> None:
        summary = explanation.summary
        has_begun = summary.id in self._begun
        self._begun.discard(summary.id)
        if summary.ttft_ms is None:
            return
        if not has_begun:
            self._first_tokens.record(summary.ttft_ms / 1000, labels)
        if summary.completion_tokens > 1:
            seconds = (summary.duration_ms - summary.ttft_ms) / 1000
            self._later_tokens.record(seconds / (summary.completion_tokens - 1), labels)

    def _count_usage(self, model: str, usage: UsageExplanation) -> None:
        self._tokens.add(usage.computed_tokens, model, "input")
        self._tokens.add(usage.cached_tokens, model, "cached_input")
        self._tokens.add(usage.completion_tokens, model, "output")
        self._seams.add(usage.seams, model)
        self._prompt_tokens.add(usage.prompt_tokens, model)
        self._hits.add(usage.pool_tokens, model, "pool")
        self._hits.add(usage.store_tokens, model, "store")
        self._hits.add(usage.remote_tokens, model, "remote")

    def _compare_cached(self, model: str, num_expected: int, usage: UsageExplanation) -> None:
        """Count what a request found otherwise than expected; of a prompt that was read to its end."""
        num_found = usage.pool_tokens + usage.store_tokens + usage.remote_tokens
        if usage.prompt_tokens and usage.computed_tokens + num_found == usage.prompt_tokens:
            self._mispredicted.count(max(0, num_expected - num_found), model, "missing")
            self._mispredicted.count(max(0, num_found - num_expected), model, "unexpected")

    def _record_move(self, model: str, move: Move) -> None:
        if move.kind != "hand_over":
            self._migrations.add(1, model, move.why)
            return
        self._hand_over_bytes.add(move.num_bytes, model, move.transport)
        self._hand_overs.record(move.duration_ms / 1000, {"model": model, "transport": move.transport})

    def _record_route(self, model: str, explanation: Explanation, route: RouteExplanation) -> None:
        self._waits.record(explanation.segment_ms("queue") / 1000, {"model": model})
        if not route.decode:
            return
        self._decisions.add(1, model, route.mode)
        for candidate in route.candidates:
            self._candidates.add(1, model, candidate.role)
        cached = route.chosen_cached_tokens
        expected = cached.own + cached.host + cached.remote
        self._expected_tokens.add(expected, model)
        self._compare_cached(model, expected, explanation.usage)
        predicted, actual = predicted_seconds(route), actual_seconds(explanation)
        if predicted > 0 and actual > 0 and not any(move.kind != "hand_over" for move in explanation.moves):
            self._predicted.add(predicted, model)
            self._actual.add(actual, model)
            self._ratios.record(actual / predicted, {"model": model})


def _labels(operation: str, requested_model: str, model: str) -> Labels:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": requested_model or UNKNOWN_MODEL,
        "gen_ai.response.model": model or UNKNOWN_MODEL,
    }


def predicted_seconds(route: RouteExplanation) -> float:
    """Return the predicted time from the route to the first token; a hand-over follows that token."""
    return route.predicted_ms.get("prefill" if route.mode == "handed_over" else "local", 0.0) / 1000


def actual_seconds(explanation: Explanation) -> float:
    """Return the time from the route to the first token's arrival at the gateway; 0 without a token."""
    return sum(each.duration_ms for each in explanation.segments if each.name in _AFTER_THE_ROUTE) / 1000


class Tally:
    """A counter that is added to on the event loop, some hundred nanoseconds each, and read in any thread."""

    def __init__(self, meter: Meter, name: str, unit: str, description: str, *labels: str) -> None:
        self._labels = labels
        self._totals: defaultdict[tuple[str, ...], float] = defaultdict(int)
        meter.create_observable_counter(name, [self._observe], unit, description)

    def add(self, amount: float, *values: str) -> None:
        """Add to the series with these values of the labels."""
        if amount:
            self._totals[values] += amount

    def count(self, amount: float, *values: str) -> None:
        """As `add`; the series is exported from then on, also if it is 0."""
        self._totals[values] += amount

    def _observe(self, options: CallbackOptions) -> Iterator[Observation]:
        for values, total in list(self._totals.items()):
            yield Observation(total, dict(zip(self._labels, values, strict=True)))


class _Histogram(Protocol):
    def record(self, amount: float, attributes: Mapping[str, str] | None = None) -> None: ...


def _export_live(meter: Meter, live: Live) -> None:
    def observed(state: str) -> Iterable[Observation]:
        counts = live.num_by_model().items()
        return [Observation(num, {"model": model or UNKNOWN_MODEL}) for (own, model), num in counts if own == state]

    meter.create_observable_gauge(
        "tandem.queue.length",
        [lambda options: observed("queued")],
        "{request}",
        "Requests that no worker has accepted yet.",
    )
    meter.create_observable_gauge(
        "tandem.requests.running", [lambda options: observed("running")], "{request}", "Requests that run."
    )
