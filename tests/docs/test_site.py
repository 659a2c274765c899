"""The documentation site: it builds without a warning, loads nothing from other hosts, and has every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\bsrc=\"(https?:)?//|<link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos/gen'}", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page for page in pages if _LOADED.search(page.read_text())] == []


def test_a_page_with_a_diagram_loads_our_copy_of_mermaid_and_others_do_not(site: Path) -> None:
    pages = [(page.read_text(), page) for page in site.rglob("index.html")]
    with_diagram = {page for text, page in pages if 'class="mermaid"' in text}
    assert {site / "index.html", site / "architecture" / "index.html"} <= with_diagram
    assert {page for text, page in pages if "mermaid.js" in text} == with_diagram
    assert "mermaid" in (site / "mermaid.js").read_text()


def test_the_reference_has_the_client_and_every_endpoint(site: Path) -> None:
    assert 'id="tandem_client.AI.run"' in (site / "python-client" / "index.html").read_text()
    endpoints = (site / "http-api" / "index.html").read_text()
    assert "/v1/chat/completions" in endpoints
    assert "/client/v4/accounts/{account}/ai/run/{model}" in endpoints
    assert 'id="ChatBody"' in (site / "http-reference.html").read_text()


def test_decisions_keep_their_numbers(site: Path) -> None:
    starts = re.findall(r'<ol start="(\d+)"', (site / "decisions" / "index.html").read_text())
    assert starts[:3] == ["5", "7", "17"]


def test_links_between_pages_work_on_the_site_as_in_the_repository(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert 'href="architecture/"' in front
    assert 'href="benchmarks/"' in front
    assert 'href="contributing/"' in front
