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
from tests.examples.worker_dev import CONFIG, ECHO, get, worker, worker_dev
from tests.examples.workerd import FOLDER
from tests.tandem_client.serving import serve

pytestmark = pytest.mark.services


@pytest.fixture
def gateway() -> Iterator[tuple[StubBinding, str]]:
    stub = StubBinding()
    with serve(stub.app()) as url:
        yield stub, url


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
        running.line_with(r"reloaded +src/index\.js$")
        assert get(f"{url}/nowhere").json() == {"error": "edited: GET /nowhere"}  # at the same address
        page = folder / "src" / "page.html"
        page.write_text("<p>new")
        running.line_with(r"reloaded +src/page\.html$")
        assert get(url).text == "<p>new"
        assert running.end() == 0
        with pytest.raises(httpx.ConnectError):  # workerd has gone with it
            get(url)


def test_a_mistake_is_told_what_ran_before_goes_on_and_the_next_change_is_tried(tmp_path: Path) -> None:
    with worker_dev(worker(tmp_path, ai={"binding": "AI"}), "--gateway", "http://127.0.0.1:9") as running:
        url = running.url
        running.line_with(r"env\.AI .* nothing answers there yet: run `tandem up`")
        mistakes = {
            "index.js": [
                ('import "./missing.js";' + ECHO, r"index\.js imports '\./missing\.js', and there is no such file"),
                (f'import "./{300 * "a"}.js";' + ECHO, "File name too long"),
                ("export default {", "  SyntaxError: Unexpected end of input"),
                ('throw new Error("at once");', "  Error: at once"),
                (ECHO.replace("version: 1", "version: 2"), "reloaded  index.js"),
            ],
            "wrangler.json": [
                ("{", "wrangler.json cannot be read"),
                (json.dumps({**CONFIG, "rules": "x"}), 'rules is "x"; it must be a list'),
                (json.dumps({**CONFIG, "kv_namespaces": [{"binding": "CACHE"}]}), r"kv_namespaces \(CACHE\)"),
                (json.dumps({**CONFIG, "vars": {"NEW": "variable"}}), "reloaded  wrangler.json"),
            ],
        }
        answer = {"AI": {}, "version": 1, "path": "/"}
        for name, changes in mistakes.items():
            for content, told in changes:
                (tmp_path / name).write_text(content)
                running.line_with(told)
                if "reloaded" in told:
                    answer["version"] = 2
                    continue
                running.line_with(r"^What ran before goes on\.$")
                assert {**get(url).json(), "AI": {}} == answer
        assert get(url).json() == {"NEW": "variable", "version": 2, "path": "/"}


def test_a_change_of_nothing_that_runs_cuts_no_stream(tmp_path: Path) -> None:
    source = """
    let life = 0;
    export default { fetch: () => new Response(String(++life)) };
    """
    with worker_dev(worker(tmp_path, source)) as running:
        url = running.url
        assert get(url).text == "1"
        (tmp_path / "README.md").write_text("news")
        (tmp_path / "index.js").touch()
        (tmp_path / "wrangler.json").write_text("{")
        running.line_with("What ran before goes on")  # so the others were seen before it
        assert get(url).text == "2"  # still the same life
        worker(tmp_path, source)
        running.line_with("reloaded")
        assert get(url).text == "1"


def test_an_error_of_the_worker_is_told_with_its_line_and_what_it_logs_as_it_is(tmp_path: Path) -> None:
    source = """
    const deep = () => missing.field;
    export default {
      fetch(request) {
        console.error("an error of its own");
        return deep();
      }
    };"""
    with worker_dev(worker(tmp_path, source)) as running:
        url = running.url
        assert get(url).status_code == 500
        running.line_with(r"^an error of its own$")
        assert running.line_with("missing is not defined") == "ReferenceError: missing is not defined\n"
        assert running.line_with("at ") == "    at deep (index.js:2:32)\n"
        assert get(url).status_code == 500
        running.line_with(r"^an error of its own$")
        assert not any("workerd/" in line or line.startswith("stack:") for line in running.lines)


def test_what_stops_it_at_once_is_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    worker(tmp_path, compatibility_date="2999-01-01", kv_namespaces=[{"binding": "CACHE"}])
    with worker_dev(tmp_path) as running:
        running.line_with(r"^tandem: wrangler.json asks for what there is not here: kv_namespaces \(CACHE\)$")
        running.line_with(r"^take it out, or go on without it: --ignore-unsupported$")
        assert running.process.wait(60) == 1
    with worker_dev(tmp_path, "--ignore-unsupported") as running:
        url = running.url
        running.line_with(r"^note  goes on without kv_namespaces \(CACHE\)$")
        running.line_with(r"^note  this workerd knows compatibility dates up to 20\d\d-\d\d-\d\d")
        assert get(url).status_code == 200
        with worker_dev(tmp_path, "--ignore-unsupported", "--port", url.rpartition(":")[2]) as second:
            second.line_with(r"^tandem: port \d+ is in use; stop what listens there, or choose another: --port \d+$")
            assert second.process.wait(60) == 1


def test_workerd_goes_when_tandem_is_killed(tmp_path: Path) -> None:
    with worker_dev(worker(tmp_path)) as running:
        url = running.url
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        descriptors = [os.pidfd_open(int(child)) for child in children]
        assert get(url).status_code == 200 and descriptors
        running.process.kill()
        running.process.wait()  # it has the socket too
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


def test_typescript_and_packages_are_bundled(tmp_path: Path) -> None:
    require_clients()
    (tmp_path / "node_modules" / "greeting").mkdir(parents=True)
    # CommonJS that asks for a module of Node.js, as many packages do.
    package = 'const { EventEmitter } = require("events"); exports.greeting = "hello " + typeof EventEmitter;'
    (tmp_path / "node_modules" / "greeting" / "index.js").write_text(package)
    (tmp_path / "node_modules" / ".bin").mkdir()
    (tmp_path / "node_modules" / ".bin" / "esbuild").symlink_to((BIN / "esbuild").resolve())
    (tmp_path / "index.ts").write_text(
        'import { greeting } from "greeting";\nimport page from "./page.html";\n'
        "export default { fetch: (): Response => new Response((greeting as string) + page) };"
    )
    (tmp_path / "page.html").write_text("<p>")
    config = {**CONFIG, "main": "index.ts", "compatibility_flags": ["nodejs_compat"]}
    (tmp_path / "wrangler.json").write_text(json.dumps(config))
    with worker_dev(tmp_path) as running:
        url = running.url
        assert get(url).text == "hello function<p>"
        (tmp_path / "index.ts").write_text(
            'import { greeting } from "greeting";\ntype Shape = { a: 1 };\n'
            "export default {\n  fetch: (): Response => new Response(greeting + missing),\n};"
        )
        running.line_with("reloaded")
        assert get(url).status_code == 500
        assert "missing is not defined" in running.line_with("Error")
        assert running.line_with("at ") == "    at Object.fetch (index.ts:4:50)\n"
        (tmp_path / "index.ts").write_text('import "nothing-like-it";')
        running.line_with(r"not loaded +index\.ts")
        running.line_with(r"esbuild could not bundle index\.ts:")
        running.line_with(r'Could not resolve "nothing-like-it"')
        running.line_with("What ran before goes on")
        assert not any("You can mark the path" in line for line in running.lines)


@pytest.mark.parametrize("with_esbuild", [True, False])
def test_a_worker_of_real_packages_runs_bundled_and_as_it_is(
    tmp_path: Path, gateway: tuple[StubBinding, str], with_esbuild: bool
) -> None:
    require_clients()
    (tmp_path / "node_modules").mkdir()
    for package in (BIN.parent).iterdir():
        if with_esbuild or package.name not in (".bin", "@esbuild", "esbuild", "wrangler"):
            (tmp_path / "node_modules" / package.name).symlink_to(package.resolve())
    (tmp_path / "index.js").write_text("""
import { generateText } from "ai";
import { createWorkersAI } from "workers-ai-provider";
export default {
  async fetch(request, env) {
    const { text } = await generateText({ model: createWorkersAI({ binding: env.AI })("m"), prompt: "hello" });
    return new Response(text);
  },
};""")
    config = {**CONFIG, "compatibility_flags": ["nodejs_compat"], "ai": {"binding": "AI"}}
    (tmp_path / "wrangler.json").write_text(json.dumps(config))
    with worker_dev(tmp_path, "--gateway", gateway[1]) as running:
        assert get(running.url).text == "You said hello"


def _wait_for_end(descriptor: int) -> None:
    try:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, "the process has ended"
    finally:
        os.close(descriptor)
