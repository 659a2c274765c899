"""The live page comes from the gateway alone, says what may run in it, and works without scripts as a page to read."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest

from control_plane.api.console import routes
from control_plane.api.console.page_files import FOLDER, PageFile, PageFiles
from control_plane.api.console.routes import page_text
from tests.control_plane.api.gateway import serve

FILES = PageFiles()


@pytest.mark.parametrize("path", ["/", f"/ui/{FILES.version}/main.js", f"/ui/{FILES.version}/vendor/preact.js"])
async def test_nothing_is_inline_and_nothing_comes_from_elsewhere(path: str) -> None:
    async with serve() as gateway:
        headers = (await gateway.client.get(path)).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


async def test_without_scripts_the_page_says_what_is_served_and_has_a_line_to_paste() -> None:
    async with serve(model_id="<b>{url}</b>") as gateway:
        text = (await gateway.client.get("/")).text
    static = text.partition("<noscript>")[2].partition("</noscript>")[0]
    assert f"curl -N {gateway.url}/client/v4/accounts/default/ai/run/&lt;b&gt;{{url}}" in static
    for path in ("/docs", "/v1/models", "/v1/workers", "/readyz"):
        assert f'href="{path}"' in static


async def test_the_page_is_compressed_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    of = PageFile.of

    def record(content: bytes, media_type: str) -> PageFile:
        made.append(content)
        return of(content, media_type)

    page_text("", ())  # reads the files, once in a process
    routes._page.cache_clear()
    monkeypatch.setattr(PageFile, "of", record)
    async with serve() as gateway:
        texts = {(await gateway.client.get("/")).text for _ in range(3)}
    assert len(texts) == len(made) == 1


async def test_the_page_names_only_files_that_are_there_and_they_stay_in_the_browser_for_ever() -> None:
    async with serve() as gateway:
        text = (await gateway.client.get("/")).text
        paths = re.findall(r'(?:href|src)="(/ui/[^"]+)"', text)
        answers = [await gateway.client.get(path) for path in paths]
    assert len(paths) >= 5 and {answer.status_code for answer in answers} == {200}
    assert {answer.headers["cache-control"] for answer in answers} == {"public, max-age=31536000, immutable"}


async def test_every_import_of_a_script_is_a_file_of_the_page() -> None:
    for name in (name for name in FILES.names if name.endswith(".js")):
        script = (FOLDER / name).read_text()
        for target in re.findall(r'^import[^"]*"([^"]+)"', script, re.MULTILINE):
            assert target.startswith("."), f"{name} imports {target}"
            assert ((FOLDER / name).parent / target).resolve().is_file(), f"{name} imports {target}"


async def test_a_file_is_sent_compressed_and_only_if_it_is_not_there_yet() -> None:
    path = f"/ui/{FILES.version}/page.css"
    content = (FOLDER / "page.css").read_bytes()
    async with serve() as gateway:
        plain = await gateway.client.get(path, headers={"accept-encoding": "identity"})
        async with gateway.client.stream("GET", path, headers={"accept-encoding": "gzip"}) as response:
            packed = b"".join([piece async for piece in response.aiter_raw()])
        known = await gateway.client.get(path, headers={"if-none-match": plain.headers["etag"]})
    assert plain.content == gzip.decompress(packed) == content
    assert response.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert (known.status_code, known.content) == (304, b"")
    assert plain.headers["etag"].strip('"') == hashlib.sha256(content).hexdigest()[:16]


async def test_a_page_of_another_version_gets_files_but_may_not_keep_them() -> None:
    async with serve() as gateway:
        answer = await gateway.client.get("/ui/0123456789abcdef/main.js")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize("name", ["none.js", "../app.py", "..%2f..%2fapp.py", "", "index.html"])
async def test_there_are_no_other_files(name: str) -> None:
    async with serve() as gateway:
        answer = await gateway.client.get(f"/ui/{FILES.version}/{name}")
    assert answer.status_code == 404


async def test_a_gateway_without_a_feed_says_what_to_ask_instead() -> None:
    async with serve() as gateway:
        answer = await gateway.client.get("/v1/live")
    assert answer.status_code == 503 and "ask for the list of workers" in answer.json()["error"]["message"]
