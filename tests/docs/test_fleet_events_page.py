"""Compares the page of the fleet's events with the table of kinds."""

from __future__ import annotations

import re
from pathlib import Path

from control_plane.events.kinds import FROM_LOG, KINDS
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "operate" / "fleet-events.md"
LOG_PAGE = ROOT / "docs" / "operate" / "events.md"


def test_the_page_has_every_kind_with_its_severity_and_message() -> None:
    table = PAGE.read_text().partition("## Kinds")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{kind.name}` | {kind.severity} | {kind.source} | {kind.message} |" for kind in KINDS.values()]


def test_every_kind_from_the_log_is_a_line_that_is_documented() -> None:
    text = LOG_PAGE.read_text()
    missing = [name for name in FROM_LOG if f"| `{name}` |" not in text]
    assert not missing


def test_every_kind_from_the_log_is_logged_by_the_gateway() -> None:
    packages = ("control_plane", "tandem_runtime")
    code = "".join(path.read_text() for package in packages for path in Path(ROOT / package).rglob("*.py"))
    assert not [name for name in FROM_LOG if code.count(f'"{name}"') < 2], "once in the table, once where it is logged"


def test_the_message_of_every_kind_from_the_log_has_fields_that_its_line_has() -> None:
    fields: dict[str, set[str]] = {}
    for line in LOG_PAGE.read_text().partition("## Gateway")[2].splitlines():
        if (row := re.match(r"\| `(\w+)` \| \w+ \| ([^|]*) \|", line)) is not None:
            fields.setdefault(row[1], set()).update(re.findall(r"`(\w+)`", row[2]))
    wrong = {
        kind.name: missing
        for kind in FROM_LOG.values()
        if (
            missing := {*re.findall(r"{(\w+)}", kind.message), *filter(None, (kind.cause, kind.highest))}
            - fields[kind.name]
        )
    }
    assert not wrong
