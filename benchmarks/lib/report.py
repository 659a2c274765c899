"""Formats figures for people: tables on the terminal, pages in results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.measuring import Measured
from benchmarks.lib.stats import PERCENTILES, STEPS, Figures

_LATENCIES = {
    "ttft_ms": "TTFT",
    "itl_ms": "ITL",
    "hand_over_gap_ms": "gap between tokens 1 and 2",
    "tpot_ms": "TPOT",
    "request_ms": "whole request",
}
MAX_FOREIGN_CPU_SHARE = 0.1
"""Above this share, figures are marked as disturbed by other load."""
Rows = list[tuple[str, ...]]


def latency_rows(measured: Measured) -> Rows:
    """Return one row per latency: its name, then p50 / p95 / p99 of each arrangement in milliseconds."""
    return [
        (f"{title}, ms", *(_percentiles(figures, name) for figures in measured.by_arrangement.values()))
        for name, title in _LATENCIES.items()
    ] + [("output tokens/s", *(f"{each['output_tokens_per_second']:.1f}" for each in measured.by_arrangement.values()))]


def share_rows(measured: Measured) -> Rows:
    """Return one row per step: its name, then median milliseconds and share of each arrangement."""
    return [
        (step, *(f"{figures[f'step_ms.{step}']:.2f}  {figures[f'share.{step}']:6.1%}" for figures in arrangements))
        for arrangements in [measured.by_arrangement.values()]
        for step in (*STEPS, "uncovered")
    ]


def headline(measured: Measured) -> str:
    """Progress what was sent, and how quiet the machine was."""
    load = measured.workload
    num_requests = next(iter(measured.by_arrangement.values()))["num_requests"]
    return (
        f"{load.num_prompt_tokens} prompt tokens, {load.num_output_tokens} output tokens, "
        f"{load.concurrency} at a time, {num_requests:.0f} requests each; "
        f"{measured.foreign_cpu_share:.0%} of the CPU used by others{_warning(measured)}"
    )


def _warning(measured: Measured) -> str:
    return " (DISTURBED: not to be quoted)" if measured.foreign_cpu_share > MAX_FOREIGN_CPU_SHARE else ""


def ratio_lines(measured: Measured) -> list[str]:
    return [f"{name.removeprefix('ratio.')} = {value:.2f}" for name, value in measured.ratios.items()]


def print_measured(console: Console, model: str, measured: Measured) -> None:
    console.print(f"\n[bold]{model}[/bold]: {headline(measured)}", highlight=False)
    for title, rows in _tables(measured):
        table = Table(title, *measured.by_arrangement)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print("ratios of medians: " + "; ".join(ratio_lines(measured)), highlight=False)


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    for name, value in conditions.items():
        console.print(f"{name:<14} {plain(value)}", highlight=False, markup=False)


def markdown(conditions: Mapping[str, Any], results: Mapping[str, Sequence[Measured]]) -> str:
    """Return the same as a page, with its conditions."""
    lines = ["# First light", "", *(f"- {name}: {plain(value)}" for name, value in conditions.items()), ""]
    lines += ["Latencies are p50 / p95 / p99. A step has its median in ms and its share of all requests' time; steps"]
    lines += ["overlap, and `uncovered` is the time in which none was under way.", ""]
    for model, measurements in results.items():
        for measured in measurements:
            lines += [f"## {model}, {measured.workload.concurrency} at a time", "", headline(measured) + ".", ""]
            for title, rows in _tables(measured):
                lines += markdown_table((title, *measured.by_arrangement), rows)
            lines += ["Ratios of medians: " + "; ".join(ratio_lines(measured)) + ".", ""]
    return "\n".join(lines)


def _tables(measured: Measured) -> list[tuple[str, Rows]]:
    return [("p50 / p95 / p99", latency_rows(measured)), ("step: median ms, share", share_rows(measured))]


def markdown_table(head: Sequence[str], rows: Rows) -> list[str]:
    """Return the lines of a table, and an empty one."""
    write: Callable[[Sequence[str]], str] = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return [write(head), write(["---", *["---:"] * (len(head) - 1)]), *(write(row) for row in rows), ""]


def _percentiles(figures: Figures, name: str) -> str:
    return " / ".join(f"{figures[f'{name}.p{percent}']:.1f}" for percent in PERCENTILES)


def plain(value: Any) -> str:
    """Write a condition as people would."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(each)}" for name, each in value.items())
    return ", ".join(map(plain, value)) if isinstance(value, list) else str(value)
