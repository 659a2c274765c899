"""Counts the files and lines that one streamed chat request crosses in each process, and the size of the code.

python -m benchmarks.walk [--root DIR] [--quick] [--json FILE] [--markdown FILE]

The services of the checkout DIR run under a line tracer. The same kind of request goes twice before the recorded one.
What an idle process runs (heartbeats, audits) is recorded too, and left out. Prefill and decode are separate
(`--local-prefill never`). `--quick` counts the code alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.command import Outcome, Progress, Sheet, parser, run
from benchmarks.lib.report import Rows
from benchmarks.walk.code_size import count_classes, count_import_edges, count_lines
from benchmarks.walk.fleet import Recording, TracedFleet

_PROMPTS = ("What is a KV cache?", "How do I stream tokens?", "What is 17 + 25?")
_GENERATED = "protos/gen/"


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, save; return the exit code."""
    options_of = parser("walk", __doc__, "count the code alone, without a request")
    options_of.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the checkout; default: this one")
    options_of.add_argument("--files", action="store_true", help="list the files that the request crosses")
    options = options_of.parse_args(arguments)
    root = options.root.resolve()

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        _enter_size(outcome, root)
        if options.quick:
            return
        async with TracedFleet(root, folder) as fleet:
            progress("two requests to warm up")
            for prompt in _PROMPTS[:2]:
                await fleet.ask(prompt)
            progress("an idle recording, then the request")
            idle = await fleet.record(None)
            walked = await fleet.record(_PROMPTS[2])
        crossed = without(walked, idle)
        _enter_walk(outcome, crossed)
        if options.files:
            _enter_files(outcome, crossed)

    return run("walk", options, {"requests": "one streamed POST /v1/chat/completions"}, measure, is_timed=False)


# -------------------------------------------------------------------------------------------------- pure from here on


def without(walked: Sequence[Recording], idle: Sequence[Recording]) -> list[Recording]:
    """Return the recordings without the lines that the same process runs idly; files without lines are left out."""
    idle_lines = {recording.process: recording.lines for recording in idle}
    found = []
    for recording in walked:
        ours = idle_lines.get(recording.process, {})
        lines = {file: numbers - ours.get(file, frozenset()) for file, numbers in recording.lines.items()}
        kept = {file: numbers for file, numbers in lines.items() if numbers and not file.startswith(_GENERATED)}
        found.append(Recording(recording.process, kept))
    return found


def _enter_size(outcome: Outcome, root: Path) -> None:
    size = {
        "product_lines": count_lines(root),
        "classes": count_classes(root),
        "control_plane_import_edges": count_import_edges(root, "control_plane"),
    }
    outcome.figures |= {name: float(count) for name, count in size.items()}
    rows: Rows = [(name.replace("_", " "), f"{count:,}") for name, count in size.items()]
    outcome.sheets.append(
        Sheet("Product code, without demo model, generated code, tests, benchmarks", ("", "number"), rows)
    )


def _enter_walk(outcome: Outcome, crossed: Sequence[Recording]) -> None:
    rows: Rows = []
    for recording in [*sorted(crossed, key=lambda each: each.process), _together(crossed)]:
        num_lines = sum(map(len, recording.lines.values()))
        in_gateway = sum(file.startswith("control_plane/") for file in recording.lines)
        rows.append((recording.process, str(len(recording.lines)), f"{num_lines:,}", str(in_gateway)))
        name = recording.process.replace(" ", "_")
        outcome.figures |= {
            f"{name}.files": float(len(recording.lines)),
            f"{name}.lines": float(num_lines),
            f"{name}.control_plane_files": float(in_gateway),
        }
    head = ("process", "files", "distinct lines", "files of control_plane")
    outcome.sheets.append(Sheet("What one streamed chat request crosses", head, rows))


def _together(crossed: Sequence[Recording]) -> Recording:
    lines: dict[str, frozenset[int]] = {}
    for recording in crossed:
        for file, numbers in recording.lines.items():
            lines[file] = lines.get(file, frozenset()) | numbers
    return Recording("all processes", lines)


def _enter_files(outcome: Outcome, crossed: Sequence[Recording]) -> None:
    for recording in crossed:
        rows: Rows = [(file, str(len(numbers))) for file, numbers in sorted(recording.lines.items())]
        outcome.sheets.append(Sheet(recording.process, ("file", "lines"), rows))


if __name__ == "__main__":
    sys.exit(main())
