"""The page of fields names the tools as they are pinned, and only fields that the endpoints have."""

from __future__ import annotations

import re
from typing import Any

from control_plane.api.openapi.document import document
from tests.docs.markdown import ROOT
from tests.tools import environments
from tests.tools.catalogue import TOOLS

_PAGE = (ROOT / "docs/clients/fields.md").read_text()
_ROW = re.compile(r"^\| ([\w-]+) \| ([\w.]+) \| `(/\S+)` \| (.*) \|$", flags=re.MULTILINE)


def test_every_tool_has_its_pinned_version_on_the_page() -> None:
    assert {(name, version) for name, version, _, _ in _ROW.findall(_PAGE)} == {
        (tool.name, environments.version(tool)) for tool in TOOLS
    }


def test_every_field_on_the_page_is_one_of_its_endpoint() -> None:
    whole = document("http://x")
    unknown = {
        f"{path}: {field}"
        for _, _, path, cell in _ROW.findall(_PAGE)
        for field in re.findall(r"`([^`]+)`", cell)
        if re.split(r"[.\[]", field)[0] not in _properties(whole, path)
    }
    assert unknown == set()


def _properties(whole: dict[str, Any], path: str) -> dict[str, Any]:
    schema = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    properties: dict[str, Any] = whole["components"]["schemas"][name]["properties"]
    return properties
