"""The trace of a generation, and the gaps between its tokens.

Names follow OpenTelemetry's semantic conventions for generative AI. The requested model is `unknown` unless it is a
name of a served model: neither an attribute nor a label may hold a caller's text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.metrics import Histogram

from control_plane.explain.journal import Journal
from control_plane.generation import ModelDescription, Usage
from control_plane.text.prepared import Asked
from tandem_runtime import metrics

UNKNOWN_MODEL = "unknown"
GAPS_PER_SAMPLE = 32


class GenerationMeter:
    """The instrument of gaps between tokens. Create one per process, after `metrics.configure`.

    All else that is measured of a request is recorded from its explanation: `control_plane.request_metrics`.
    """

    def __init__(self) -> None:
        self.gaps = metrics.meter().create_histogram(
            "tandem.inter_token_latency",
            unit="s",
            description="Gaps between two tokens of a stream, one of 32.",
            explicit_bucket_boundaries_advisory=metrics.SECONDS,
        )


class GapSampler:
    """Measures one gap in GAPS_PER_SAMPLE of a stream, the first at a random position.

    To record a gap takes 5 microseconds, as long as a hundred tokens may cost here: so most are only counted.
    """

    __slots__ = ("_before", "_gaps", "_labels", "_num_left")

    def __init__(self, gaps: Histogram, model_id: str, num_left: int | None = None) -> None:
        """`num_left` arrivals until the one that begins the first measured gap."""
        self._gaps = gaps
        self._labels = {"model": model_id}
        self._num_left = random.randint(1, GAPS_PER_SAMPLE) if num_left is None else num_left
        self._before = 0.0

    def arrived(self) -> None:
        """Tokens have arrived; those that arrive together count as one."""
        self._num_left = num_left = self._num_left - 1
        if num_left > 0:
            return
        now = time.perf_counter()
        if num_left < 0:
            self._gaps.record(now - self._before, self._labels)
            self._num_left = GAPS_PER_SAMPLE - 1
        self._before = now


class GenerationRecord:
    """Records one generation in the attributes of the server's span, and tells its journal of failures."""

    def __init__(self, meter: GenerationMeter, request: Asked, journal: Journal) -> None:
        """The span is the current span."""
        operation = request.operation
        self.journal = journal
        self._meter = meter
        self._span = trace.get_current_span()
        self._operation = operation
        self._requested_model = request.model
        self._span.update_name(operation)
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": UNKNOWN_MODEL,
                "gen_ai.provider.name": "tandem",
            }
        )
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
        self._span.set_attribute("gen_ai.response.model", model.model_id)
        is_known = self._requested_model in (model.model_id, *model.aliases)
        self.journal.model_found(model.model_id, self._requested_model if is_known else "")
        if is_known:
            self._span.set_attribute("gen_ai.request.model", self._requested_model)
            self._span.update_name(f"{self._operation} {self._requested_model}")

    def new_gaps(self, model_id: str) -> GapSampler:
        """Return the sampler of the gaps between the tokens of one stream."""
        return GapSampler(self._meter.gaps, model_id)

    def failed(self, error: BaseException) -> None:
        """Record that the generation was refused, failed or was cancelled."""
        self._span.set_attribute("error.type", type(error).__name__)
        self.journal.failed(error)

    def finished(self, usage: Usage, finish_reasons: Sequence[str]) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
                "gen_ai.usage.output_tokens": usage.num_completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
                "gen_ai.response.finish_reasons": list(finish_reasons),
            }
        )
