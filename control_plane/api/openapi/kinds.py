"""How does a JSON Schema read, in one line?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}"}


def kind_html(schema: Mapping[str, Any]) -> str:
    """Return the kind of value as HTML: names of schemas are links, null is left out."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in schema and "type" not in schema:
            kinds = [kind_html(each) for each in schema[word] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values if value is not None)
    return _plain(schema)


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return name, schema and whether it is required of every field, required ones first, harmless ones last."""
    required = set(schema.get("required", ()))
    fields = [(name, each, name in required) for name, each in schema.get("properties", {}).items()]
    return sorted(fields, key=lambda each: (not each[2], kind_html(each[1]) == "anything"))


def _plain(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "anything")
    if kind == "array":
        of = f" of {kind_html(schema['items'])}" if schema.get("items") else ""
        return f"list{of}{_sizes(schema, 'Items', 'items')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {kind_html(schema['additionalProperties'])}"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    return f"{words.get(str(kind), str(kind))}{_bounds(schema)}{_sizes(schema, 'Length', 'characters')}"


def _bounds(schema: Mapping[str, Any]) -> str:
    said = [words.format(f"{schema[name]:,}") for name, words in _BOUNDS.items() if name in schema]
    return f", {' '.join(said)}" if said else ""


def _sizes(schema: Mapping[str, Any], what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if most is not None:
        return f" ({least or 0} to {most} {unit})"
    return " (not empty)" if least else ""
