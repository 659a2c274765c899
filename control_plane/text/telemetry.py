"""Traces and metrics of a generation.

Names follow OpenTelemetry's semantic conventions for generative AI. The cached part of the prompt has its own token
type, `cached_input`. The requested model is `unknown` unless it is a name of a served model: a label must not hold a
caller's text, and a metric's labels are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry import trace

from control_plane.generation import ModelDescription, Usage
from control_plane.text.prepared import Asked
from tandem_runtime import metrics

UNKNOWN_MODEL = "unknown"


class GenerationMeter:
    """The metrics' instruments. Create one per process, after `metrics.configure`."""

    def __init__(self) -> None:
        meter = metrics.meter()
        self.durations = meter.create_histogram(
            "gen_ai.server.request.duration", unit="s", description="From the request's start to its last token."
        )
        self.first_tokens = meter.create_histogram(
            "gen_ai.server.time_to_first_token", unit="s", description="From the request's start to its first text."
        )
        self.later_tokens = meter.create_histogram(
            "gen_ai.server.time_per_output_token", unit="s", description="Mean time of a token after the first."
        )
        self.tokens = meter.create_counter("tandem.tokens", unit="{token}", description="Tokens by type and model.")


class GenerationRecord:
    """Records one generation in the attributes of the server's span and in the metrics."""

    def __init__(self, meter: GenerationMeter, request: Asked) -> None:
        """The span is the current span."""
        operation = request.operation
        self._meter = meter
        self._span = trace.get_current_span()
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._operation = operation
        self._requested_model = request.model
        self._labels = {"gen_ai.operation.name": operation, "gen_ai.request.model": UNKNOWN_MODEL}
        self._span.update_name(operation)
        self._span.set_attributes({**self._labels, "gen_ai.provider.name": "tandem"})
        self._describe_options(request)

    def _describe_options(self, request: Asked) -> None:
        options = request.options
        sent = {
            "gen_ai.request.max_tokens": options.max_tokens,
            "gen_ai.request.temperature": options.temperature,
            "gen_ai.request.top_p": options.top_p,
            "gen_ai.request.seed": options.seed,
            "gen_ai.request.choice.count": options.num_choices if options.num_choices > 1 else None,
        }
        self._span.set_attributes({name: value for name, value in sent.items() if value is not None})

    def model_found(self, model: ModelDescription) -> None:
        """Take in the model that answers: its names may be labels. A fallback answers for names that nobody knows."""
        self._labels["gen_ai.response.model"] = model.model_id
        if self._requested_model in (model.model_id, *model.aliases):
            self._labels["gen_ai.request.model"] = self._requested_model
            self._span.update_name(f"{self._operation} {self._requested_model}")
        self._span.set_attributes(self._labels)

    def text_arrived(self) -> None:
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._meter.first_tokens.record(self._first_token - self._started, self._labels)

    def failed(self, error: BaseException) -> None:
        """Record that the generation was refused, failed or was cancelled."""
        kind = type(error).__name__
        self._span.set_attribute("error.type", kind)
        self._meter.durations.record(time.perf_counter() - self._started, {**self._labels, "error.type": kind})

    def finished(self, usage: Usage, finish_reasons: Sequence[str]) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
                "gen_ai.usage.output_tokens": usage.num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
                "gen_ai.response.finish_reasons": list(finish_reasons),
            }
        )
        self._meter.durations.record(time.perf_counter() - self._started, self._labels)
        self._count_tokens(usage)

    def _count_tokens(self, usage: Usage) -> None:
        counts = {
            "input": usage.num_computed_tokens,
            "cached_input": usage.num_cached_tokens,
            "output": usage.num_completion_tokens,
        }
        for kind, count in counts.items():
            self._meter.tokens.add(count, {**self._labels, "gen_ai.token.type": kind})
        if self._first_token is not None and usage.num_completion_tokens > 1:
            seconds = time.perf_counter() - self._first_token
            self._meter.later_tokens.record(seconds / (usage.num_completion_tokens - 1), self._labels)
