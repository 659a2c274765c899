"""Reads the instruments of a process when asked. Imports the SDK: `tandem_runtime.metrics` imports this late."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import Histogram
from opentelemetry.sdk.metrics.export import MetricReader, MetricsData

MAX_HISTOGRAM_SERIES = 1_000
"""Of one histogram: 118,000 lines of text. Labels that come later are counted together, as `otel_metric_overflow`."""


class SnapshotReader(MetricReader):
    """Keeps the data of the reading in progress. One reading at a time."""

    def __init__(self) -> None:
        super().__init__(cardinality_limits={Histogram: MAX_HISTOGRAM_SERIES})
        self._data: MetricsData | None = None

    def read(self) -> MetricsData | None:
        """Read every instrument; None if nothing was measured yet."""
        self.collect()
        data, self._data = self._data, None
        return data

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """There is nothing to flush."""

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        self._data = metrics_data
