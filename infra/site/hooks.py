"""Adds the Markdown pages outside docs/ and the HTTP reference to the site.

README.md is the front page. CONTRIBUTING, CHANGELOG, SECURITY and the pages of benchmarks, examples and protos stay
where they are, so each text exists once. Links between pages work on the site and in a Git browser; a link to code
becomes its text. The HTTP reference is generated from the OpenAPI document that a gateway serves.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from control_plane.api.openapi.document import document
from control_plane.api.openapi.page import reference_page

ROOT = Path(__file__).resolve().parents[2]
# Page of the site -> file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "reporting.md": "SECURITY.md",
    "protos.md": "protos/README.md",
    "examples/worker.md": "examples/worker/README.md",
    "benchmarks/README.md": "benchmarks/README.md",
    **{name: name for name in (f"benchmarks/results/{page.name}" for page in ROOT.glob("benchmarks/results/*.md"))},
}
MERMAID = ROOT / "build" / "mermaid.min.js"
_WITHOUT_MERMAID = Path(__file__).with_name("mermaid-missing.js")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_SCRIPT = re.compile(r'<script src="[^"]*mermaid\.js"></script>')
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Load our copy of Mermaid on every page; without it the theme would load one from another host."""
    config.extra_javascript.append("mermaid.js")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are elsewhere, the HTTP reference and Mermaid."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    api = document("http://127.0.0.1:8642")
    reference = reference_page(api).replace('href="/openapi.json"', 'href="openapi.json"')
    files.append(File.generated(config, "http-reference.html", content=reference))
    files.append(File.generated(config, "openapi.json", content=json.dumps(api, indent=2)))
    script = MERMAID if MERMAID.exists() else _WITHOUT_MERMAID
    files.append(File.generated(config, "mermaid.js", abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages, and fill in the table of endpoints."""
    parts = _FENCE.split(markdown)  # code blocks are every second part
    parts[::2] = [_LINK.sub(lambda link: _link(link, page.file.src_uri), text) for text in parts[::2]]
    return "".join(parts).replace("<!-- endpoints -->", _endpoints())


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leave Mermaid, which is large, out of pages without a diagram."""
    return output if 'class="mermaid"' in output else _SCRIPT.sub("", output)


def _link(link: re.Match[str], page: str) -> str:
    """Return a Markdown link of `page` with the address it has on the site, or its text if it leads to no page."""
    image, text, address = link.groups()
    path, _, anchor = address.partition("#")
    if not path or ":" in path:
        return link[0]
    source = ELSEWHERE.get(page, f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    places = {each: place for place, each in ELSEWHERE.items()}
    there = target.removeprefix("docs/") if target.startswith("docs/") else places.get(target)
    if there is None:
        return text if (ROOT / target).exists() else link[0]  # a strict build refuses what is nowhere
    relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _endpoints() -> str:
    """Return a table of all endpoints, each with a link into the reference."""
    rows = ["| method | path | what it does |", "|---|---|---|"]
    for path, methods in document("http://127.0.0.1:8642")["paths"].items():
        for method, operation in methods.items():
            where = f"http-reference.html#{operation['operationId']}"
            summary = operation["summary"].replace("|", "\\|")
            rows.append(f"| {method.upper()} | `{path}` | [{summary}]({where}) |")
    return "\n".join(rows)
