"""The page of metrics agrees with itself; tests/system/test_metrics.py compares it with real processes."""

from __future__ import annotations

import re

import pytest

from tandem_runtime.prometheus_text import name_of
from tests import metrics_page
from tests.scrape import Scrape

ROWS = metrics_page.rows()
_UNITS = {"s": "s", "bytes": "By", "J": "J", "W": "W", "°C": "Cel", "bytes/s": "By/s", "Unix seconds": "s"}


def test_every_metric_has_a_unit_a_meaning_and_a_word_on_when_to_worry() -> None:
    assert len(ROWS) > 80
    incomplete = [row.name for row in ROWS.values() if not (row.meaning and row.worry)]
    assert incomplete == []
    assert [row.name for row in ROWS.values() if not row.unit and row.name != "target_info"] == []


@pytest.mark.parametrize("name", [name for name in ROWS if name != "target_info"])
def test_the_name_in_prometheus_follows_from_the_other_name_and_the_unit(name: str) -> None:
    row = ROWS[name]
    unit = _UNITS.get(row.unit.removesuffix(", histogram"), "")
    assert name_of(row.otel_name, unit, is_counter=row.kind == "counter") == name


def test_names_of_metrics_and_labels_are_those_of_prometheus() -> None:
    words = [*ROWS, *(label for row in ROWS.values() for label in row.labels)]
    assert [word for word in words if not re.fullmatch(r"[a-z][a-z0-9_]*", word)] == []


def test_a_metric_a_type_and_a_label_that_the_page_does_not_have_are_found() -> None:
    text = (
        b"# TYPE new gauge\nnew 1\n"
        b'# TYPE tandem_queue_length gauge\ntandem_queue_length{model="m",account="a"} 1\n'
        b'# TYPE tandem_tokens_total gauge\ntandem_tokens_total{model="m"} 1\n'
    )
    assert metrics_page.differences(Scrape(text), ROWS) == [
        "new is not on the page",
        "tandem_queue_length has the labels ['account'], which the page does not have",
        "tandem_tokens_total is a gauge, the page has a counter",
    ]
