"""`make tools`: installs each tool into build/tools, and lets it do its task against Tandem with the built-in model.

python -m tests.tools [NAME ...] [--fields FILE]

    --fields FILE   write which fields each tool sends, as a page in Markdown

Exit code: 0 all tools did their task, 1 some did not.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.tools import environments
from tests.tools.catalogue import TOOLS, Tool
from tests.tools.runs import Outcome, do, fields_page, serving


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="only these tools")
    options.add_argument("--fields", type=Path, metavar="FILE", help="write the fields that each tool sends")
    chosen = options.parse_args(arguments)
    known = {tool.name: tool for tool in TOOLS}
    if unknown := [name for name in chosen.names if name not in known]:
        options.error(f"{unknown[0]} is none of {', '.join(known)}")
    tools = [known[name] for name in chosen.names] or list(TOOLS)
    # Nothing is installed while Tandem serves: both would share the machine's cores.
    problems = {tool.name: environments.install(tool) for tool in tools}
    outcomes = asyncio.run(_run(tools, problems))
    _print(outcomes)
    if chosen.fields:
        chosen.fields.write_text(fields_page(outcomes))
    return int(any(outcome.problem for outcome in outcomes))


async def _run(tools: Sequence[Tool], problems: dict[str, str]) -> list[Outcome]:
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tandem-tools-") as name:
        async with serving(Path(name)) as served:
            for tool in tools:
                if problems[tool.name]:
                    outcomes.append(Outcome(tool, f"not installed: {problems[tool.name]}"))
                    continue
                print(f"{tool.name} ...", flush=True)
                outcome = await do(tool, served, Path(name) / tool.name)
                print(outcome.said, end="", file=sys.stderr)
                outcomes.append(outcome)
    return outcomes


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table("tool", "version", "result", "s", "requests", "refused", "looked for", title="Tools against Tandem")
    for outcome in outcomes:
        recorder = outcome.recorder
        table.add_row(
            outcome.tool.name,
            environments.version(outcome.tool),
            outcome.problem or "done",
            f"{outcome.seconds:.0f}",
            str(recorder.calls.total() if recorder else 0),
            "\n".join(f"{count} x {text}" for text, count in (recorder.refusals if recorder else {}).items())[:600],
            "\n".join(recorder.absent if recorder else ()),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
