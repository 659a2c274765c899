"""Shared by all benchmarks as commands: options, conditions, tables, figures and the check for other load."""

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

from benchmarks.lib.machine import CpuUse, machine_conditions
from benchmarks.lib.report import MAX_FOREIGN_CPU_SHARE, Rows, markdown_table, plain, print_conditions
from benchmarks.lib.stats import Figures
from tandem_runtime.garbage import forget_what_is_loaded

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sheet:
    """One table: a head, and rows with as many cells."""

    title: str
    head: tuple[str, ...]
    rows: Rows


@dataclass(frozen=True)
class Target:
    """A sentence with a figure, and whether the figure meets the target."""

    text: str
    is_met: bool

    @property
    def line(self) -> str:
        return f"{'met' if self.is_met else 'MISSED'}: {self.text}"


@dataclass
class Outcome:
    """The results of a benchmark."""

    sheets: list[Sheet] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)
    """Flat `name: number` pairs."""
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences below the tables."""


Measure = Callable[[Outcome, Path, Progress], Coroutine[Any, Any, None]]
"""Enters its results; gets a temporary folder and a function that prints progress."""


def parser(name: str, doc: str, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the common options; `quick` describes the quick form."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, as a page")
    return parser


def run(
    name: str, options: argparse.Namespace, conditions: Mapping[str, Any], measure: Measure, *, is_timed: bool = True
) -> int:
    """Measure, print, save; return 1 if a full run missed a target. An interrupted run keeps what it has measured.

    A quick run gives figures and no verdicts. Other load on the machine spoils the figures of a run that `is_timed`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    console = Console() if sys.stdout.isatty() else Console(width=150)
    command = " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])
    conditions = {**machine_conditions(), "command": command, **conditions}
    print_conditions(console, conditions)
    forget_what_is_loaded()  # as services do: a collection would hold up the client, and look like a slow answer
    before = CpuUse.now()
    outcome = Outcome()
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
            asyncio.run(measure(outcome, Path(folder), _progress_printer(console)))
    finally:
        foreign_share = CpuUse.now().foreign_share_since(before)
        outcome.figures["foreign_cpu_share"] = foreign_share
        conditions["cpu_used_by_others"] = f"{foreign_share:.1%}{_warning(foreign_share) if is_timed else ''}"
        if options.quick:
            outcome.targets, num_targets = [], len(outcome.targets)
            outcome.notes.append(f"--quick judges none of {num_targets} targets: its load is too small and too short")
        _print(console, outcome, conditions["cpu_used_by_others"])
        _save(name, options, conditions, outcome)
    return 1 if any(not target.is_met for target in outcome.targets) else 0


def _progress_printer(console: Console) -> Progress:
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
    for note in outcome.notes:
        console.print(note, highlight=False)
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
    """Return the results as a Markdown page."""
    lines = [f"# {name}", "", *(f"- {each}: {plain(value)}" for each, value in conditions.items()), ""]
    for sheet in outcome.sheets:
        lines += [f"## {sheet.title}", "", *markdown_table(sheet.head, sheet.rows)]
    lines += [f"- {note}" for note in outcome.notes]
    return "\n".join([*lines, *(f"- {target.line}" for target in outcome.targets)])
