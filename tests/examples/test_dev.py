"""Tests `tandem dev` with real wrangler, miniflare and workerd: untouched Workers, their bindings, and reloads."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.api.workers_ai import remote_proxy
from tests.examples.running_dev import CONFIG, ECHO, TOOLS, get, install, running_dev, worker
from tests.examples.stub_binding import USAGE, StubBinding
from tests.examples.workerd import FOLDER
from tests.tandem_client.serving import serve

pytestmark = pytest.mark.services

BINDINGS = Path(__file__).parent / "bindings"


@pytest.fixture(params=TOOLS, ids=lambda tools: tools.name)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with wrangler installed: the oldest and the newest that are tested, each with its Node.js."""
    return install(tmp_path, request.param)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """A folder with the newest wrangler: for what `tandem dev` does itself, whatever wrangler it finds."""
    return install(tmp_path, TOOLS[-1])


def proxied(app: Starlette) -> Starlette:
    """Add the gateway's remote proxy in front of an application's routes."""
    app.router.routes[:0] = remote_proxy.routes()
    return app


@pytest.fixture
def gateway() -> Iterator[tuple[StubBinding, str]]:
    stub = StubBinding()
    with serve(proxied(stub.app())) as url:
        yield stub, url


def test_the_example_runs_untouched_and_what_is_edited_is_loaded(
    project: Path, gateway: tuple[StubBinding, str]
) -> None:
    stub, gateway_url = gateway
    shutil.copytree(FOLDER, project, ignore=shutil.ignore_patterns("node_modules", ".wrangler"), dirs_exist_ok=True)
    with running_dev(project, "--gateway", gateway_url) as running:
        url = running.url
        assert get(url).text.startswith("<!doctype html>")
        assert get(f"{url}/run?prompt=hello").json() == {"response": "You said hello", "usage": USAGE}
        assert stub.calls[0]["model"] == "@cf/meta/llama-3.1-8b-instruct"  # what its wrangler.jsonc says
        source = project / "src" / "index.js"
        source.write_text(source.read_text().replace("nothing at", "edited:"))
        running.line_with(r"reloaded +src/index\.js$")
        assert get(f"{url}/nowhere").json() == {"error": "edited: GET /nowhere"}  # at the same address
        page = project / "src" / "page.html"
        page.write_text("<p>new")
        running.line_with(r"reloaded +src/page\.html$")
        assert get(url).text == "<p>new"
        assert running.end() == 0
        with pytest.raises(httpx.ConnectError):  # the port is free again
            get(url)


def test_kv_d1_r2_durable_objects_and_assets_are_here_and_last(project: Path, gateway: tuple[StubBinding, str]) -> None:
    shutil.copytree(BINDINGS, project, dirs_exist_ok=True)
    (project / ".dev.vars").write_text("SECRET=of the file")
    state = {"kv": "from kv", "r2": "from r2", "asset": "an asset\n", "variables": ["hello", "of the file"]}
    with running_dev(project, "--gateway", gateway[1]) as running:
        url = running.url
        assert get(f"{url}/state").json() == {**state, "d1": {"num": 1, "text": "from d1"}, "count": 1}
        assert get(f"{url}/page.txt").text == "an asset\n"
        # 1. Answers of env.AI, whole and streamed.
        assert get(f"{url}/hello").json() == {"version": 1, "response": "You said /hello"}
        events = [line.removeprefix("data: ") for line in get(f"{url}/stream").text.splitlines() if line]
        assert "".join(json.loads(event)["response"] for event in events[:-1]) == "One two three"
        assert events[-1] == "[DONE]"
        # 2. A WebSocket passes, up to a Durable Object.
        assert b"echo hi" in websocket_reply(url, "hi")
        # 3. After a reload, of an asset or a source, the data is still here.
        (project / "public" / "new.txt").write_text("another")
        running.line_with(r"reloaded +public/new\.txt$")
        assert get(f"{url}/new.txt").text == "another"
        source = project / "index.ts"
        source.write_text(source.read_text().replace("version: 1", "version: 2"))
        running.line_with(r"reloaded +index\.ts$")
        assert get(f"{url}/hello").json()["version"] == 2
        assert get(f"{url}/state").json() == {**state, "d1": {"num": 2, "text": "from d1"}, "count": 2}
    # 4. The data lasts, where `wrangler dev` keeps it too.
    with running_dev(project, "--gateway", gateway[1]) as running:
        assert get(f"{running.url}/state").json() == {**state, "d1": {"num": 3, "text": "from d1"}, "count": 3}
    assert (project / ".wrangler" / "state" / "v3" / "d1").is_dir()


def websocket_reply(url: str, text: str) -> bytes:
    """Open a WebSocket, send a text in one frame and return all bytes up to the echo."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13"
        head = f"GET /socket HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: upgrade\r\nupgrade: websocket\r\n{key}"
        connection.sendall(f"{head}\r\n\r\n".encode())
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 101")
        connection.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text.encode())
        while f"echo {text}".encode() not in received:
            received += connection.recv(4096)
    return received


def test_a_browser_that_leaves_in_mid_stream_is_seen_by_the_gateway(
    newest: Path, gateway: tuple[StubBinding, str]
) -> None:
    stub, gateway_url = gateway
    shutil.copytree(FOLDER, newest, ignore=shutil.ignore_patterns("node_modules", ".wrangler"), dirs_exist_ok=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "endless"}
    with (
        running_dev(newest, "--gateway", gateway_url) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=30) as client,
    ):
        with client.stream("POST", "/chat", json=body) as answer:
            assert b"more" in next(answer.iter_raw())
        assert stub.client_left.wait(30)


def test_a_mistake_is_told_what_ran_before_goes_on_and_the_next_change_is_tried(project: Path) -> None:
    with running_dev(worker(project, ai={"binding": "AI"}), "--gateway", "http://127.0.0.1:9") as running:
        running.line_with(r"^Tandem .* does not answer yet: run `tandem up`")
        url = running.url
        mistakes = {
            "index.js": [
                ('import "./missing.js";' + ECHO, r'Could not resolve "\./missing\.js"'),
                ("export default {", "Expected identifier but found end of file"),
                ('throw new Error("at once");' + ECHO, "The Worker failed as it started; its error is above"),
                (ECHO.replace("version: 1", "version: 2"), r"reloaded +index\.js"),
            ],
            "wrangler.json": [
                ("{", r"wrangler\.json"),
                (json.dumps({**CONFIG, "vars": {"NEW": "variable"}}), r"reloaded +wrangler\.json"),
            ],
        }
        answer = {"AI": {}, "version": 1, "path": "/"}
        for name, changes in mistakes.items():
            for content, told in changes:
                (project / name).write_text(content)
                running.line_with(told)
                if "reloaded" in told:
                    answer["version"] = 2
                    continue
                running.line_with(r"^The previous Worker keeps running\.$")
                assert {**get(url).json(), "AI": {}} == answer
        assert get(url).json() == {"NEW": "variable", "version": 2, "path": "/"}


def test_a_worker_that_does_not_compile_at_first_runs_once_it_does(newest: Path) -> None:
    with running_dev(worker(newest, "export default {")) as running:
        running.line_with("Expected identifier but found end of file")
        running.line_with("^tandem dev waits for a change")
        worker(newest)
        assert get(running.url).json()["version"] == 1


def test_a_change_of_nothing_that_runs_cuts_no_stream(newest: Path) -> None:
    source = """
    let life = 0;
    export default { fetch: () => new Response(String(++life)) };
    """
    with running_dev(worker(newest, source)) as running:
        url = running.url
        assert get(url).text == "1"
        (newest / "README.md").write_text("news")
        (newest / "index.js").touch()
        (newest / "wrangler.json").write_text("{")
        running.line_with("The previous Worker keeps running")  # so the others were seen before it
        assert get(url).text == "2"  # still the same life
        worker(newest, source)
        running.line_with("reloaded")
        assert get(url).text == "1"


def test_an_error_of_the_worker_is_told_with_its_line_and_what_it_logs_as_it_is(project: Path) -> None:
    source = """
    const deep = () => missing.field;
    export default {
      fetch(request) {
        console.error("an error of its own");
        return deep();
      }
    };"""
    with running_dev(worker(project, source)) as running:
        url = running.url
        assert get(url).status_code == 500
        running.line_with(r"^an error of its own$")
        assert running.line_with("missing is not defined") == "ReferenceError: missing is not defined\n"
        assert running.line_with("at ") == "    at deep (index.js:2:32)\n"
        assert get(url).status_code == 500
        running.line_with(r"^an error of its own$")
        assert not any("workerd/" in line or line.startswith("stack:") for line in running.lines)


def test_a_port_in_use_is_one_sentence_with_the_remedy(newest: Path) -> None:
    with running_dev(worker(newest, compatibility_date="2999-01-01")) as running:
        running.line_with(r"^note +this workerd knows compatibility dates up to 20\d\d-\d\d-\d\d")
        url = running.url
        assert get(url).status_code == 200
        with running_dev(newest, "--port", url.rpartition(":")[2]) as second:
            second.line_with(r"^tandem: port \d+ is in use; stop what listens there, or choose another: --port \d+$")
            assert second.process.wait(60) == 1


def test_workerd_goes_when_tandem_is_killed(newest: Path) -> None:
    with running_dev(worker(newest)) as running:
        url = running.url
        descriptors = [os.pidfd_open(child) for child in descendants(running.process.pid)]
        assert get(url).status_code == 200 and len(descriptors) >= 2  # Node.js and workerd
        running.process.kill()
        running.process.wait()
        for descriptor in descriptors:
            wait_for_end(descriptor)
        with pytest.raises(httpx.ConnectError):
            get(url)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


def wait_for_end(descriptor: int) -> None:
    try:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, "the process has ended"
    finally:
        os.close(descriptor)


def test_the_binding_has_any_name_and_the_token_goes_with_it(newest: Path) -> None:
    seen: list[str | None] = []

    async def run(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return JSONResponse({"response": "hi"})

    source = "export default { fetch: async (_, env) => Response.json(await env.MODELS.run('m', { prompt: 'x' })) };"
    (newest / "index.js").write_text(source)
    (newest / "wrangler.toml").write_text(
        'main = "index.js"\ncompatibility_date = "2026-04-01"\n[ai]\nbinding = "MODELS"\n'
    )
    app = Starlette(routes=[Route("/run", run, methods=["POST"])])
    with serve(proxied(app)) as gateway_url:
        environment = {"TANDEM_TOKEN": 'tdm_a"b', "TANDEM_BASE_URL": gateway_url}
        with running_dev(newest, environment=environment) as running:
            assert get(running.url).json() == {"response": "hi"}
            assert not any("tdm_" in line for line in running.lines)
    assert seen == ['Bearer tdm_a"b']


def test_variables_arrive_as_they_are_and_an_environment_has_its_own(newest: Path) -> None:
    variables = {"TEXT": 'a "quoted"\nlä\\ne', "NUMBER": 7, "OBJECT": {"a": [1, None]}}
    named = {"staging": {"vars": {"TEXT": "staging"}}}
    worker(newest, vars=variables, env=named)
    with running_dev(newest) as running:
        assert get(running.url).json() == {**variables, "version": 1, "path": "/"}
    with running_dev(newest, "--env", "staging") as running:
        assert get(running.url).json() == {"TEXT": "staging", "version": 1, "path": "/"}


def test_typescript_and_packages_are_bundled(project: Path) -> None:
    # CommonJS that asks for a module of Node.js, as many packages do.
    package = 'const { EventEmitter } = require("events"); exports.greeting = "hello " + typeof EventEmitter;'
    (project / "node_modules" / "greeting").mkdir()
    (project / "node_modules" / "greeting" / "index.js").write_text(package)
    (project / "index.ts").write_text(
        'import { greeting } from "greeting";\nimport page from "./page.html";\n'
        "export default { fetch: (): Response => new Response((greeting as string) + page) };"
    )
    (project / "page.html").write_text("<p>")
    config = {**CONFIG, "main": "index.ts", "compatibility_flags": ["nodejs_compat"]}
    (project / "wrangler.json").write_text(json.dumps(config))
    with running_dev(project) as running:
        url = running.url
        assert get(url).text == "hello function<p>"
        (project / "index.ts").write_text(
            'import { greeting } from "greeting";\ntype Shape = { a: 1 };\n'
            "export default {\n  fetch: (): Response => new Response(greeting + missing),\n};"
        )
        running.line_with("reloaded")
        assert get(url).status_code == 500
        assert "missing is not defined" in running.line_with("Error")
        assert running.line_with("at ") == "    at Object.fetch (index.ts:4:50)\n"
        (project / "index.ts").write_text('import "nothing-like-it";')
        running.line_with(r"not loaded +index\.ts")
        running.line_with(r'Could not resolve "nothing-like-it"')
        running.line_with("The previous Worker keeps running")


def test_assets_alone_are_served_without_a_worker(newest: Path) -> None:
    (newest / "public").mkdir()
    (newest / "public" / "index.html").write_text("<p>page")
    config = {"name": "site", "compatibility_date": "2026-04-01", "assets": {"directory": "public"}}
    (newest / "wrangler.json").write_text(json.dumps(config))
    with running_dev(newest) as running:
        assert get(running.url).text == "<p>page"
