"""The page of findings has a row for each, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from tests.docs.markdown import ROOT, code_spans, tables

PAGE = ROOT / "docs/any-machine.md"
FINDINGS = [f"{letter}{number}" for letter, count in (("H", 4), ("M", 10), ("L", 15)) for number in range(1, count + 1)]


class Row(NamedTuple):
    finding: str
    cells: list[str]
    """What was wrong, what was done, tests, commits."""


def _rows() -> list[Row]:
    found = []
    for _, lines in tables(PAGE.read_text()):
        for line in lines[2:]:
            finding, *cells = (cell.strip() for cell in line.strip().strip("|").split("|"))
            found.append(Row(finding, cells))
    return found


def test_each_finding_has_one_row_in_order() -> None:
    assert [row.finding for row in _rows()] == FINDINGS


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.finding)
def test_a_row_says_what_was_wrong_and_done_and_names_tests_that_exist_and_commits(row: Row) -> None:
    wrong, done, tests, commits = row.cells
    assert wrong and done
    names = code_spans(tests)
    assert names and [name for name in names if not _exists(name)] == []
    assert code_spans(commits) and all(re.fullmatch(r"[0-9a-f]{7}", commit) for commit in code_spans(commits))


def _exists(name: str) -> bool:
    """Return whether `file::function` is a test."""
    file, _, function = name.partition("::")
    path = ROOT / file
    if not (function.startswith("test_") and path.is_file() and file.startswith("tests/")):
        return False
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function for node in nodes)
