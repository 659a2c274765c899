"""Does `tandem worker dev` tell what answers env.AI, and of workerd's words only those for the Worker's author?"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tandem_client.cli.worker_assets import Assets
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import WorkerConfig
from tandem_client.cli.worker_errors import ErrorLines
from tandem_client.cli.worker_view import View
from tests.tandem_client.serving import serve

FOLDER = Path("/somewhere/worker")
CONFIG = WorkerConfig(FOLDER, FOLDER / "wrangler.toml", None, "2026-11-01", ai_binding="AI", name="chat")


def models(*names: str) -> Response:
    return JSONResponse({"data": [{"id": name} for name in names]})


async def told(view_of: WorkerConfig, url: str, token: str | None = None) -> list[str]:
    printed = io.StringIO()
    await View(Console(file=printed, width=40)).started(view_of, 8787, Upstream(url, token))
    return printed.getvalue().splitlines()


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (models("@tandem/demo"), "@tandem/demo"),
        (models("a", "b", "c", "d", "e"), "a, b, c and 2 more"),
        (models(), "has no model loaded yet"),
        (Response(status_code=401), "wants a token: set TANDEM_TOKEN"),
        (PlainTextResponse("It works!"), "answers, but not as Tandem does; is it the right --gateway?"),
        (Response(status_code=404), "answers, but not as Tandem does; is it the right --gateway?"),
    ],
)
async def test_what_answers_is_told_beside_the_binding(answer: Response, wanted: str) -> None:
    tokens: list[str | None] = []

    async def asked(request: Request) -> Response:
        tokens.append(request.headers.get("authorization"))
        return answer

    with serve(Starlette(routes=[Route("/v1/models", asked)])) as url:
        lines = await told(CONFIG, url, "tdm_1")
        assert lines[:2] == ["chat    http://127.0.0.1:8787", f"env.AI  {url}  {wanted}"]
    assert tokens == ["Bearer tdm_1"]


async def test_only_what_there_is_is_told_and_secrets_by_name() -> None:
    variables, assets = {"MODEL": "m", "KEY": "tell nobody"}, Assets(FOLDER / "dist")
    config = WorkerConfig(
        *(FOLDER, FOLDER / "wrangler.toml", None, "2026-11-01"),
        variables=variables,
        secrets=frozenset({"KEY"}),
        assets=assets,
        name="site",
    )
    assert await told(config, "http://127.0.0.1:9") == [
        "site       http://127.0.0.1:8787",
        "assets     dist",
        "variables  MODEL, KEY (secret)",
        "What you edit is loaded at once. Ctrl-C ends it.",
    ]


WORKERD = """workerd/io/worker.c++:3042: info: uncaught exception; source = Uncaught (in promise); stack = TypeError: no
    at deep (a.js:1:19)
workerd/io/io-context.c++:656: info: uncaught exception; exception = workerd/jsg/value.h:1456: failed: jsg.TypeError: no
stack: /somewhere/bin/workerd@3f68b70 /somewhere/bin/workerd@3f69955
workerd/server/listen/mod.rs:372: error: Uncaught exception: workerd/jsg/value.h:1: failed: remote.jsg.TypeError: no
what the Worker writes: error: info: warning:
workerd/server/server.c++:12: warning: something is deprecated
workerd/server/listen/mod.rs:372: error: Uncaught exception: workerd/jsg/value.h:1: failed: remote.jsg.Error: other
service worker: Uncaught SyntaxError: Unexpected end of input
  at a.js:1:16"""


def test_of_workerds_words_only_those_for_the_author_are_shown_each_once() -> None:
    lines = ErrorLines()
    assert [shown for line in WORKERD.splitlines() for shown in lines.shown(line)] == [
        "TypeError: no",
        "    at deep (a.js:1:19)",
        "what the Worker writes: error: info: warning:",
        "something is deprecated",
        "Error: other",
        "SyntaxError: Unexpected end of input",
        "  at a.js:1:16",
    ]
