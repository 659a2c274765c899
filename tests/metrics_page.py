"""Reads docs/operate/metrics.md: one row for each metric."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.markdown import ROOT, tables
from tests.scrape import Scrape

PAGE = ROOT / "docs/operate/metrics.md"
_HEAD = ["metric", "OpenTelemetry name", "unit", "labels", "meaning", "when to worry"]


@dataclass(frozen=True)
class Row:
    """A metric as the page has it."""

    section: str
    name: str
    otel_name: str
    unit: str
    labels: frozenset[str]
    meaning: str
    worry: str

    @property
    def kind(self) -> str:
        """The type of the family in Prometheus' text format."""
        if "histogram" in self.unit:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def rows() -> dict[str, Row]:
    """Return the rows of all tables of metrics, by the metric's Prometheus name."""
    found = list(_rows(PAGE.read_text()))
    assert len({row.name for row in found}) == len(found), "a metric is on the page twice"
    return {row.name: row for row in found}


def _rows(text: str) -> Iterator[Row]:
    lines = text.splitlines()
    for number, table in tables(text):
        head, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]
        if head != _HEAD:
            continue
        section = next(line[3:] for line in reversed(lines[:number]) if line.startswith("## "))
        for name, otel_name, unit, labels, meaning, worry in body:
            names = frozenset(re.findall(r"`([^`]+)`", labels))
            yield Row(section, name.strip("`"), otel_name.strip("`"), unit, names, meaning, worry)


def differences(scrape: Scrape, page: dict[str, Row]) -> list[str]:
    """Return how the metrics of a process differ from the page."""
    return [difference for name, kind in scrape.types.items() for difference in _differences(scrape, page, name, kind)]


def _differences(scrape: Scrape, page: dict[str, Row], name: str, kind: str) -> Iterator[str]:
    row = page.get(name)
    if row is None:
        yield f"{name} is not on the page"
        return
    if row.kind != kind:
        yield f"{name} is a {kind}, the page has a {row.kind}"
    if more := scrape.label_names(name) - row.labels - _OF_THE_SDK:
        yield f"{name} has the labels {sorted(more)}, which the page does not have"


_OF_THE_SDK = {"telemetry_sdk_language", "telemetry_sdk_name", "telemetry_sdk_version", "otel_metric_overflow"}
