"""The page of limits has every bound of the HTTP side, as the code has it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from control_plane.api.http import bounds
from control_plane.api.http.connections import ConnectionLimits
from control_plane.settings import ControlPlaneSettings
from infra.site import limits_page
from tests.docs.markdown import ROOT

_NO_SETTINGS = {"grace_seconds", "linger_seconds", "sweep_seconds"}
_LITERAL_BOUND = re.compile(r"(?:max_length|max_items|maxItems|maxLength)[\"']?\s*[=:]\s*\d")


def test_the_page_is_what_its_script_writes() -> None:
    assert limits_page.PAGE.read_text() == limits_page.page(), "run `python -m infra.site.limits_page`"


def test_every_bound_has_a_row_that_says_what_happens_beyond_it() -> None:
    rows = {name: text for _, section in limits_page.sections() for name, text in section}
    assert rows.keys() == {name for name in vars(bounds) if name.startswith("MAX_")} - {"MAX_GRAMMAR_CHARACTERS"}
    assert [name for name, text in rows.items() if not re.search(r"refused with 4\d\d|closes|is cut", text)] == []


def test_every_limit_of_the_server_is_a_setting_with_the_same_default() -> None:
    defaults = {field.name: field.default for field in fields(ControlPlaneSettings)}
    limits = {field.name: field.default for field in fields(ConnectionLimits) if field.name not in _NO_SETTINGS}
    assert limits == {name: defaults[name] for name in limits} and limits.keys() <= set(limits_page.SETTINGS)


def test_no_schema_has_a_bound_of_its_own() -> None:
    """A bound that is a literal in a schema would be missing on the page."""
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in sorted((ROOT / "control_plane/api").rglob("*.py"))
        for match in _LITERAL_BOUND.finditer(path.read_text())
    ]
    assert found == []


def test_a_check_fails_for_a_page_that_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "limits.md"
    monkeypatch.setattr(limits_page, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["limits_page", "--check"])
    assert limits_page.main() == 1 and "python -m infra.site.limits_page" in capsys.readouterr().err
    page.write_text(limits_page.page())
    assert limits_page.main() == 0
