"""Does `tandem worker dev` serve a Worker's assets as Cloudflare does?"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.examples.worker_dev import ECHO, get, worker, worker_dev

pytestmark = pytest.mark.services


def site(folder: Path, *pages: str) -> None:
    """Write files that say their own names."""
    for page in pages:
        path = folder / "public" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)


def test_assets_go_before_the_worker_which_gets_the_rest(tmp_path: Path) -> None:
    site(tmp_path, "index.html", "docs/index.html", "app.js", "a b.txt", ".well-known/x", "_headers", "_redirects")
    source = ECHO.replace(
        "return Response.json",
        'if (request.headers.has("x-asset")) return env.ASSETS.fetch(request);\n    return Response.json',
    )
    worker(tmp_path, source, assets={"directory": "./public", "binding": "ASSETS"})
    with worker_dev(tmp_path) as running:
        url = running.url
        for path, text, kind in (("/", "index.html", "text/html"), ("/docs/", "docs/index.html", "text/html")):
            assert get(url + path).text == text and get(url + path).headers["content-type"].startswith(kind)
        assert get(f"{url}/app.js").headers["content-type"].startswith("text/javascript")
        assert get(f"{url}/a%20b.txt").text == "a b.txt" and get(f"{url}/.well-known/x").text == ".well-known/x"
        for path in ("/api", "/_headers", "/_redirects", "/docs/none"):
            assert get(url + path).json()["path"] == path
        posted = httpx.post(f"{url}/api", trust_env=False, timeout=20)
        assert posted.json()["path"] == "/api"
        for headers in ({}, {"x-asset": "1"}):  # an asset is no one to post to, as on Cloudflare
            assert httpx.post(f"{url}/app.js", headers=headers, trust_env=False, timeout=20).status_code == 405
        asked = httpx.get(f"{url}/none", headers={"x-asset": "1"}, trust_env=False, timeout=20)
        assert asked.status_code == 404


WAYS: dict[str, dict[str, str | int]] = {
    "auto-trailing-slash": {
        "/": "index.html", "/index.html": "-> /", "/a": "a.html", "/a.html": "-> /a", "/a/": "-> /a",
        "/b": "-> /b/", "/b/": "b/index.html", "/b/index": "-> /b/", "/b.html": "-> /b/", "/c.txt": "c.txt",
    },
    "force-trailing-slash": {
        "/": "index.html", "/a": "-> /a/", "/a/": "a.html", "/a.html": "-> /a/", "/b": "-> /b/", "/b/": "b/index.html",
    },
    "drop-trailing-slash": {
        "/": "index.html", "/a": "a.html", "/a/": "-> /a", "/a.html": "-> /a", "/b": "b/index.html", "/b/": "-> /b",
    },
    "none": {"/": 404, "/index.html": "index.html", "/a": 404, "/a.html": "a.html", "/b/": 404},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_pages_have_the_addresses_that_html_handling_says(tmp_path: Path, way: str) -> None:
    site(tmp_path, "index.html", "a.html", "b/index.html", "c.txt")
    assets = {"directory": "public", "html_handling": way}
    (tmp_path / "wrangler.json").write_text(json.dumps({"compatibility_date": "2026-11-01", "assets": assets}))
    with worker_dev(tmp_path) as running:
        url, found = running.url, {}
        for path in WAYS[way]:
            answer = get(f"{url}{path}?q=1")
            to = answer.headers.get("location", "")
            assert not to or (answer.status_code == 307 and to.endswith("?q=1"))
            found[path] = f"-> {to[:-4]}" if to else answer.text if answer.status_code == 200 else answer.status_code
        assert found == WAYS[way]


def test_what_is_not_found_is_a_page_and_rules_say_who_is_asked_first(tmp_path: Path) -> None:
    site(tmp_path, "index.html", "404.html", "deep/404.html", "api/file.txt")
    assets = {"directory": "public", "not_found_handling": "404-page", "run_worker_first": ["/api/*", "!/api/file*"]}
    worker(tmp_path, assets=assets)

    def opened(url: str) -> tuple[int, str]:
        answer = httpx.get(url, headers={"sec-fetch-mode": "navigate"}, trust_env=False, timeout=20)
        return answer.status_code, answer.text

    with worker_dev(tmp_path) as running:
        url = running.url
        assert opened(f"{url}/none") == (404, "404.html") and opened(f"{url}/deep/er/none") == (404, "deep/404.html")
        assert get(f"{url}/none").json()["path"] == "/none"  # no page is opened, so the Worker is asked
        assert opened(f"{url}/api/none")[0] == 200 and get(f"{url}/api/none").json()["path"] == "/api/none"
        assert get(f"{url}/api/file.txt").text == "api/file.txt" and get(f"{url}/api/file").text == "404.html"
        assets["not_found_handling"] = "single-page-application"
        worker(tmp_path, assets={**assets, "run_worker_first": False})
        running.line_with("reloaded")
        assert opened(f"{url}/some/view") == (200, "index.html")
        assert get(f"{url}/some/view").json()["path"] == "/some/view"
        worker(tmp_path, assets={**assets, "run_worker_first": True})
        running.line_with("reloaded")
        assert get(url).json()["path"] == "/"


def test_headers_and_redirects_are_those_of_the_files(tmp_path: Path) -> None:
    site(tmp_path, "index.html", "team/ann.html")
    (tmp_path / "public" / "_redirects").write_text(
        "/old/* /new/:splat 301\n/me /team/ann 200\n/out https://x.example/"
    )
    headers = "/team/:name\n  X-Name: :name\n  ! Cache-Control\n/*\n  X-Seen: 1\n  X-Name: all\nnonsense"
    (tmp_path / "public" / "_headers").write_text(headers)
    worker(tmp_path, assets={"directory": "public"})
    with worker_dev(tmp_path) as running:
        url = running.url
        running.line_with("note  line 7 of _headers changes nothing")
        moved = get(f"{url}/old/a/b?q=1")
        assert (moved.status_code, moved.headers["location"]) == (301, "/new/a/b?q=1")
        assert (get(f"{url}/out").status_code, get(f"{url}/out").headers["location"]) == (302, "https://x.example/")
        assert get(f"{url}/me").text == "team/ann.html"
        page = get(f"{url}/team/ann")
        assert page.headers["x-name"] == "ann, all" and "cache-control" not in page.headers
        assert get(url).headers["x-seen"] == "1" and "must-revalidate" in get(url).headers["cache-control"]
        assert "x-seen" not in get(f"{url}/of-the-worker").headers
