"""Reads the Markdown pages of the repository for tests about them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`]*`+")


def pages() -> list[Path]:
    """Return every Markdown file that git tracks or would track."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({ROOT / name for name in names if name and (ROOT / name).is_file()})


def prose(text: str) -> str:
    """Return a page with its code blocks blanked, so that line numbers stay."""
    return _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)


def tables(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each table as the number of its first line and its lines."""
    lines = prose(text).splitlines()
    start = None
    for number, line in enumerate([*lines, ""]):
        is_row = line.lstrip().startswith("|")
        if is_row and start is None:
            start = number
        elif not is_row and start is not None:
            yield start + 1, lines[start:number]
            start = None


def num_cells(row: str) -> int:
    """Count the cells of a table's row as GitHub does: a `|` splits even inside code, unless it is escaped."""
    inner = row.strip().replace("\\|", "").removeprefix("|").removesuffix("|")
    return inner.count("|") + 1


def code_spans(text: str) -> list[str]:
    """Return what stands in backticks outside of code blocks."""
    return [span.strip("`").strip() for span in _CODE.findall(prose(text))]
