"""Does `tandem worker dev` run an untouched Worker in real workerd, and load what changes?"""

from __future__ import annotations

import json
import os
import select
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.clients.node import BIN, require_clients
from tests.examples.stub_binding import USAGE, StubBinding
from tests.examples.worker_dev import worker_dev
from tests.examples.workerd import FOLDER
from tests.tandem_client.serving import serve

pytestmark = pytest.mark.services

CONFIG = {"main": "index.js", "compatibility_date": "2026-11-01"}
ECHO = """
export default {
  async fetch(request, env) {
    return Response.json({ ...env, ASSETS: undefined, version: 1, path: new URL(request.url).pathname });
  },
};
"""


@pytest.fixture
def gateway() -> Iterator[tuple[StubBinding, str]]:
    stub = StubBinding()
    with serve(stub.app()) as url:
        yield stub, url


def worker(folder: Path, source: str = ECHO, **config: object) -> Path:
    (folder / "index.js").write_text(source)
    (folder / "wrangler.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, timeout=20)


def test_the_example_runs_untouched_and_what_is_edited_is_loaded(
    tmp_path: Path, gateway: tuple[StubBinding, str]
) -> None:
    stub, gateway_url = gateway
    folder = tmp_path / "worker"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("node_modules"))
    with worker_dev(folder, "--gateway", gateway_url) as running:
        url = running.url
        assert get(url).text.startswith("<!doctype html>")
        assert get(f"{url}/run?prompt=hello").json() == {"response": "You said hello", "usage": USAGE}
        assert stub.calls[0]["model"] == "@cf/meta/llama-3.1-8b-instruct"  # what its wrangler.jsonc says
        source = folder / "src" / "index.js"
        source.write_text(source.read_text().replace("nothing at", "edited:"))
        running.line_with(r"reloaded after a change of src/index\.js")
        assert get(f"{url}/nowhere").json() == {"error": "edited: GET /nowhere"}  # at the same address
        page = folder / "src" / "page.html"
        page.write_text("<p>new")
        running.line_with(r"reloaded after a change of src/page\.html")
        assert get(url).text == "<p>new"
        assert running.end() == 0
        with pytest.raises(httpx.ConnectError):  # workerd has gone with it
            get(url)


def test_a_mistake_is_told_and_the_next_change_is_tried(tmp_path: Path) -> None:
    with worker_dev(worker(tmp_path), "--gateway", "http://127.0.0.1:9") as running:
        running.line_with("nothing answers at http://127.0.0.1:9 yet")
        url = running.url
        (tmp_path / "index.js").write_text('import "./missing.js";' + ECHO)
        running.line_with(r"index\.js imports './missing\.js'")
        assert running.line_with("next change") == "what ran before goes on; the next change is tried\n"
        assert get(url).json()["version"] == 1
        (tmp_path / "index.js").write_text("export default {")
        running.line_with("nothing runs; the next change is tried")
        (tmp_path / "index.js").write_text(ECHO.replace("version: 1", "version: 2"))
        running.line_with("reloaded")
        assert get(url).json()["version"] == 2


def test_workerd_goes_when_tandem_is_killed(tmp_path: Path) -> None:
    with worker_dev(worker(tmp_path)) as running:
        url = running.url
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        descriptors = [os.pidfd_open(int(child)) for child in children]
        assert get(url).status_code == 200 and descriptors
        running.process.kill()
        for descriptor in descriptors:
            _wait_for_end(descriptor)
        with pytest.raises(httpx.ConnectError):
            get(url)


def test_the_binding_has_any_name_and_the_token_goes_with_it(tmp_path: Path) -> None:
    seen: list[str | None] = []

    async def run(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return JSONResponse({"response": "hi"})

    source = "export default { fetch: async (_, env) => Response.json(await env.MODELS.run('m', { prompt: 'x' })) };"
    (tmp_path / "index.js").write_text(source)
    (tmp_path / "wrangler.toml").write_text(
        'main = "index.js"\ncompatibility_date = "2026-11-01"\n[ai]\nbinding = "MODELS"\n'
    )
    app = Starlette(routes=[Route("/run", run, methods=["POST"])])
    with serve(app) as gateway_url:
        environment = {"TANDEM_TOKEN": 'tdm_a"b', "TANDEM_BASE_URL": gateway_url}
        with worker_dev(tmp_path, environment=environment) as running:
            assert get(running.url).json() == {"response": "hi"}
            assert not any("tdm_" in line for line in running.lines)
    assert seen == ['Bearer tdm_a"b']


def test_variables_arrive_as_they_are_and_an_environment_has_its_own(tmp_path: Path) -> None:
    variables = {"TEXT": 'a "quoted"\nlä\\ne', "NUMBER": 7, "OBJECT": {"a": [1, None]}}
    named = {"staging": {"vars": {"TEXT": "staging"}}}
    worker(tmp_path, vars=variables, env=named)
    with worker_dev(tmp_path) as running:
        assert get(running.url).json() == {**variables, "version": 1, "path": "/"}
    with worker_dev(tmp_path, "--env", "staging") as running:
        assert get(running.url).json() == {"TEXT": "staging", "version": 1, "path": "/"}


def test_assets_go_before_the_worker_which_gets_the_rest(tmp_path: Path) -> None:
    public = tmp_path / "public"
    (public / "docs").mkdir(parents=True)
    (public / "index.html").write_text("<p>home")
    (public / "docs" / "index.html").write_text("<p>docs")
    (public / "app.js").write_text("1")
    source = ECHO.replace(
        "return Response.json",
        'if (request.headers.has("x-asset")) return env.ASSETS.fetch(request);\n    return Response.json',
    )
    worker(tmp_path, source, assets={"directory": "./public", "binding": "ASSETS"})
    with worker_dev(tmp_path) as running:
        url = running.url
        for path, text, kind in (("/", "<p>home", "text/html"), ("/docs", "<p>docs", "text/html")):
            assert get(url + path).text == text and get(url + path).headers["content-type"].startswith(kind)
        assert get(f"{url}/app.js").headers["content-type"].startswith("text/javascript")
        assert get(f"{url}/api").json()["path"] == "/api"
        posted = httpx.post(f"{url}/app.js", trust_env=False, timeout=20)
        assert posted.json()["path"] == "/app.js"
        asked = httpx.post(f"{url}/app.js", headers={"x-asset": "1"}, trust_env=False, timeout=20)
        assert asked.status_code == 405


def test_typescript_and_packages_are_bundled(tmp_path: Path) -> None:
    require_clients()
    (tmp_path / "node_modules" / "greeting").mkdir(parents=True)
    (tmp_path / "node_modules" / "greeting" / "index.js").write_text('export const greeting = "hello";')
    (tmp_path / "node_modules" / ".bin").mkdir()
    (tmp_path / "node_modules" / ".bin" / "esbuild").symlink_to((BIN / "esbuild").resolve())
    (tmp_path / "index.ts").write_text(
        'import { greeting } from "greeting";\nimport page from "./page.html";\n'
        "export default { fetch: (): Response => new Response((greeting as string) + page) };"
    )
    (tmp_path / "page.html").write_text("<p>")
    (tmp_path / "wrangler.json").write_text(json.dumps({**CONFIG, "main": "index.ts"}))
    with worker_dev(tmp_path) as running:
        assert get(running.url).text == "hello<p>"


def _wait_for_end(descriptor: int) -> None:
    try:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, "the process has ended"
    finally:
        os.close(descriptor)
