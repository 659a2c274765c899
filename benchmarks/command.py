"""What do benchmarks have in common as commands: options, conditions, tables, figures, a guard against others' load?"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figures
from benchmarks.machine import CpuUse, machine_conditions
from benchmarks.report import MAX_FOREIGN_CPU_SHARE, Rows, markdown_table, plain, print_conditions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sheet:
    """One table: a head, and rows of as many cells."""

    title: str
    head: tuple[str, ...]
    rows: Rows


@dataclass(frozen=True)
class Target:
    """A sentence with the number in it, and whether the number is as it should be."""

    text: str
    is_met: bool

    @property
    def line(self) -> str:
        return f"{'met' if self.is_met else 'MISSED'}: {self.text}"


@dataclass
class Outcome:
    """What a benchmark has found."""

    sheets: list[Sheet] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)
    """Flat `name: number` pairs."""
    targets: list[Target] = field(default_factory=list)


Measure = Callable[[Outcome, Path, Say], Coroutine[Any, Any, None]]
"""Enters what it finds; it has a folder for its own files, gone afterwards, and a way to say what it is doing."""


def parser(name: str, doc: str, quick: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all have; `quick` says what the quick form does."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, as a page")
    return parser


def run(
    name: str, options: argparse.Namespace, conditions: Mapping[str, Any], measure: Measure, *, is_timed: bool = True
) -> int:
    """Measure, print, save; return 1 if a full run has missed a target. A run that breaks off keeps what it has.

    Others' load spoils figures of a run that `is_timed`, and no others.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    console = Console() if sys.stdout.isatty() else Console(width=150)
    command = " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])
    conditions = {**machine_conditions(), "command": command, **conditions}
    print_conditions(console, conditions)
    before = CpuUse.now()
    outcome = Outcome()
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
            asyncio.run(measure(outcome, Path(folder), _sayer(console)))
    finally:
        foreign_share = CpuUse.now().foreign_share_since(before)
        outcome.figures["foreign_cpu_share"] = foreign_share
        conditions["cpu_used_by_others"] = f"{foreign_share:.1%}{_warning(foreign_share) if is_timed else ''}"
        _print(console, outcome, conditions["cpu_used_by_others"])
        _save(name, options, conditions, outcome)
    return 1 if not options.quick and any(not target.is_met for target in outcome.targets) else 0


def _sayer(console: Console) -> Say:
    return lambda line: console.print(line, style="dim", highlight=False)


def _warning(foreign_share: float) -> str:
    return " (DISTURBED: not to be quoted)" if foreign_share > MAX_FOREIGN_CPU_SHARE else ""


def _print(console: Console, outcome: Outcome, used_by_others: str) -> None:
    for sheet in outcome.sheets:
        table = Table(*sheet.head, title=sheet.title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for target in outcome.targets:
        console.print(target.line, style="" if target.is_met else "red", highlight=False)
    console.print(f"CPU used by others: {used_by_others}", highlight=False)


def _save(name: str, options: argparse.Namespace, conditions: Mapping[str, Any], outcome: Outcome) -> None:
    if options.json:
        figures = {each: float(f"{value:.6g}") for each, value in outcome.figures.items()}
        options.json.write_text(json.dumps({"conditions": conditions, "figures": figures}, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(page(name, conditions, outcome) + "\n")


def page(name: str, conditions: Mapping[str, Any], outcome: Outcome) -> str:
    """Return all there is to say as a page."""
    lines = [f"# {name}", "", *(f"- {each}: {plain(value)}" for each, value in conditions.items()), ""]
    for sheet in outcome.sheets:
        lines += [f"## {sheet.title}", "", *markdown_table(sheet.head, sheet.rows)]
    return "\n".join([*lines, *(f"- {target.line}" for target in outcome.targets)])
