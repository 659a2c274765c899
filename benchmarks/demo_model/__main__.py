"""Grades the built-in model's answers to questions that it was never trained on, through a running gateway.

python -m benchmarks.demo_model [--quick] [--json FILE] [--markdown FILE] [--checkpoint FOLDER] [--per-family N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.demo_model.eval import Evaluated, Evaluator, Question, questions, readme_questions, story_requests
from benchmarks.demo_model.scores import Scores, missed_targets, scores_of
from benchmarks.lib.machine import machine_conditions
from benchmarks.lib.served import Served
from tandem_engine.demo import checkpoint_path

_PER_FAMILY = 300
_SAMPLED_PER_FAMILY = 60
_QUICK_PER_FAMILY = 8
_ROLES = ("decode", "kv", "prefill")


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, print, save; return 1 if a full run misses a target."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    console = Console() if sys.stdout.isatty() else Console(width=120)
    conditions = _conditions(options)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        greedy, sampled, shown = asyncio.run(_ask_all(options, Path(folder), console))
    scores = scores_of(greedy, sampled)
    _print(console, scores, shown, greedy if options.show_wrong else (), options.show_wrong)
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions, "figures": scores.flat()}, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(conditions, scores, shown))
    if options.quick:
        console.print("--quick judges no target: it asks too few questions", highlight=False)
        return 0
    missed = missed_targets(scores)
    for line in missed:
        console.print(f"missed: {line}", style="red", highlight=False)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_model", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_PER_FAMILY} questions a family: under a minute")
    parser.add_argument("--per-family", type=int, default=_PER_FAMILY, metavar="N", help="greedy questions a family")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, as a page")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="another package than the built-in one")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers of each family")
    return parser


async def _ask_all(
    options: argparse.Namespace, folder: Path, console: Console
) -> tuple[list[Evaluated], list[Evaluated], list[Evaluated]]:
    """Return the greedy answers, those at temperature 0.6, and those to the README's questions."""
    checkpoint = (options.checkpoint or checkpoint_path()).resolve()
    flags = ("--model", str(checkpoint)) if options.checkpoint else ()
    per_family = _QUICK_PER_FAMILY if options.quick else options.per_family
    async with Served(folder / "run", flags, {}, _ROLES) as served, Evaluator(served, checkpoint) as evaluator:
        asked = questions(per_family)
        console.print(f"asking {len(asked)} held-out questions, greedily", style="dim", highlight=False)
        greedy = await evaluator.ask(asked, temperature=0.0)
        again = [*_first_of_each(asked, min(per_family, _SAMPLED_PER_FAMILY)), *story_requests(_QUICK_PER_FAMILY * 5)]
        console.print(f"asking {len(again)} of them and for stories, at temperature 0.6", style="dim", highlight=False)
        sampled = await evaluator.ask(again, temperature=0.6)
        return greedy, sampled, await evaluator.ask(readme_questions(), temperature=0.0)


def _first_of_each(asked: Sequence[Question], number: int) -> list[Question]:
    families = dict.fromkeys(question.family for question in asked)
    return [question for family in families for question in [q for q in asked if q.family == family][:number]]


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **machine_conditions(),
        "command": " ".join(["python -m benchmarks.demo_model", *sys.argv[1:]]),
        "requests": "streamed through the gateway of a disaggregated `tandem up`, eight at a time",
        "checkpoint": str(options.checkpoint.name) if options.checkpoint else "built-in",
    }


def _rows(scores: Scores) -> list[tuple[str, ...]]:
    return [
        (family, *(f"{value:.1%}" if value is not None else "" for value in values))
        for family, values in scores.by_family().items()
    ]


_COLUMNS = ("family", "exactly right", "ended by itself", "exactly right at 0.6", "on topic at 0.6")


def _print(
    console: Console, scores: Scores, shown: Sequence[Evaluated], greedy: Sequence[Evaluated], num_wrong: int
) -> None:
    table = Table(*_COLUMNS, title="answers to held-out questions")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _rows(scores):
        table.add_row(*row)
    console.print(table)
    for one in shown:
        console.print(f"> {one.question.asked}\n{one.answer}", highlight=False, markup=False)
    for family in dict.fromkeys(one.question.family for one in greedy):
        wrong = [one for one in greedy if one.question.family == family and not one.is_right]
        for one in wrong[:num_wrong]:
            text = f"{family}\n  asked    {one.question.asked!r}\n  expected {one.question.expected!r}"
            console.print(f"{text}\n  answered {one.answer!r}", highlight=False, markup=False)


def markdown(conditions: Mapping[str, Any], scores: Scores, shown: Sequence[Evaluated]) -> str:
    """Return the same as a page, with its conditions."""
    lines = ["# The built-in model's answers", "", f"`{conditions['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in conditions.items() if name != "command"]
    lines += ["", f"| {' | '.join(_COLUMNS)} |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(scores)]
    for one in shown:
        lines += ["", f"> {one.question.asked}", "", one.answer]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
