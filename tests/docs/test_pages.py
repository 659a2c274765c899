"""Pages: tables are whole, links lead somewhere, and the files that are named exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, code_spans, num_cells, pages, prose, tables

_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)+\.(py|md|toml|proto|jsonl?|sh|yml)")
_FOLDER = re.compile(r"[\w.-]+(/[\w.-]+)*/")
_MADE_BY_A_BUILD = {"http-reference.html", "openapi.json"}
_NAMING_FILES = ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/questions.md", "docs/decisions.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_as_many_cells_as_its_header(page: Path) -> None:
    broken = [
        f"line {first + offset}: {row}"
        for first, rows in tables(page.read_text())
        for offset, row in enumerate(rows)
        if num_cells(row) != num_cells(rows[0])
    ]
    assert broken == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = [link.partition("#")[0] for link in _LINK.findall(prose(page.read_text())) if ":" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    assert set(missing) <= _MADE_BY_A_BUILD


@pytest.mark.parametrize("name", _NAMING_FILES)
def test_every_file_that_a_page_names_exists(name: str) -> None:
    named = [span for span in code_spans((ROOT / name).read_text()) if _FILE.fullmatch(span) or _FOLDER.fullmatch(span)]
    missing = [each for each in named if not (ROOT / each).exists() and not (ROOT / "tandem_engine" / each).exists()]
    assert missing == []


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[:2] == ["Unreleased", version]


def test_the_page_of_questions_has_ten_each_with_an_answer() -> None:
    parts = re.split(r"^## \d+\. .*\?$", (ROOT / "docs/questions.md").read_text(), flags=re.MULTILINE)
    assert len(parts) == 11
    assert all(part.strip() for part in parts)


def test_the_ten_questions_name_only_files_that_the_architecture_names() -> None:
    """So that the two pages alone give the answers."""
    known = set(code_spans((ROOT / "docs/architecture.md").read_text() + (ROOT / "README.md").read_text()))
    named = {span for span in code_spans((ROOT / "docs/questions.md").read_text()) if _FILE.fullmatch(span)}
    assert named <= known
