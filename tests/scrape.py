"""Reads Prometheus' text format, and answers as Prometheus would."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]


class Scrape:
    """One scrape of one process."""

    def __init__(self, text: bytes) -> None:
        self.types: dict[str, str] = {}
        """By the name of the family, which is the name of its samples but for a histogram's."""
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text.decode()):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            self.types[name] = family.type
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))

    def since(self, earlier: Scrape) -> Scrape:
        """Return what was counted after an earlier scrape of the process; for counters and histograms."""
        grown = Scrape(b"")
        grown.types = self.types
        for name, samples in self._samples.items():
            before = {tuple(sorted(labels.items())): value for labels, value in earlier.series(name)}
            grown._samples[name] = [
                (labels, value - before.get(tuple(sorted(labels.items())), 0.0)) for labels, value in samples
            ]
        return grown

    def series(self, name: str) -> list[tuple[Labels, float]]:
        return self._samples.get(name, [])

    def labels(self, name: str) -> list[Labels]:
        return [labels for labels, _ in self.series(name)]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the series that have these labels."""
        return sum(value for own, value in self.series(name) if labels.items() <= own.items())

    def label_names(self, family: str) -> set[str]:
        """Return the names of the labels that the series of a family have, without `le`."""
        names = [family, f"{family}_count"]
        return {key for name in names for labels in self.labels(name) for key in labels} - {"le"}

    def quantile(self, name: str, quantile: float, **labels: str) -> float:
        """Return histogram_quantile(quantile, sum by (le) (name_bucket{labels})), as Prometheus computes it.

        https://github.com/prometheus/prometheus/blob/main/promql/quantile.go, `bucketQuantile`.
        """
        counts: dict[float, float] = {}
        for own, value in self.series(f"{name}_bucket"):
            if labels.items() <= own.items():
                counts[float(own["le"])] = counts.get(float(own["le"]), 0.0) + value
        buckets = sorted(counts.items())
        assert buckets and buckets[-1][0] == math.inf, f"{name} is no histogram with these labels"
        rank = quantile * buckets[-1][1]
        index = next(i for i, (_, count) in enumerate(buckets) if count >= rank)
        if index == len(buckets) - 1:
            return buckets[-2][0]
        start, before = buckets[index - 1] if index else (0.0, 0.0)
        end, count = buckets[index]
        return start + (end - start) * (rank - before) / (count - before)
