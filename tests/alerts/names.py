"""Reads PromQL: the names of the metrics in an expression."""

from __future__ import annotations

import re
from collections.abc import Iterator

from infra.observability.files import boards
from infra.observability.pace import PRODUCTION
from infra.observability.rules import expressions, groups
from tests.docs.markdown import ROOT, tables

_STRING = re.compile(r'"[^"]*"')
_NOT_NAMES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_WORDS = {"and", "or", "unless", "offset", "bool", "d", "h", "m", "s", "ms"}
_SUFFIXES = ("_bucket", "_count", "_sum")


def metric_names(expression: str) -> set[str]:
    """Return the names of the series that an expression reads."""
    bare = _NOT_NAMES.sub(" ", _STRING.sub('""', expression))
    return {name for name in _NAME.findall(bare) if name not in _WORDS}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield each query of each panel, with the names of dashboard and panel."""
    for board in boards():
        for panel in board.panels:
            for expression, _ in panel.queries:
                yield f"{board.uid}: {panel.title}", expression


def filled(query: str, model: str = ".*", role: str = ".*", interval: str = "5s") -> str:
    """Return a panel's query as Grafana sends it."""
    return query.replace("$__rate_interval", interval).replace("$model", model).replace("$role", role)


def recorded_names() -> set[str]:
    return {rule["record"] for group in groups(PRODUCTION) for rule in group["rules"] if "record" in rule}


def all_expressions() -> list[str]:
    return [*expressions(groups(PRODUCTION)), *(query for _, query in dashboard_queries())]


def documented_names() -> set[str]:
    """Return the names of the page of metrics, with those that a histogram has in Prometheus."""
    found: set[str] = set()
    for _, lines in tables((ROOT / "docs/operate/metrics.md").read_text()):
        if lines[0].startswith("| metric |"):
            for line in lines[2:]:
                name, _, unit = (cell.strip(" `") for cell in line.split("|")[1:4])
                found |= {name + suffix for suffix in _SUFFIXES} if "histogram" in unit else {name}
    return found
