"""Derives the JSON Schema that a grammar enforces for a tool's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from control_plane.text.tool import Tool
from tandem_engine.grammar import Grammar
from tandem_runtime.errors import InvalidRequest, Unsupported

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OFTEN_NOT_BUILT = frozenset(
    {
        "pattern", "format", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains", "not", "if",
        "then", "else", "dependentSchemas", "dependentRequired",
    }
)  # fmt: skip
"""Keywords that only narrow a schema. Without them, the schema allows the same values and more."""
_ANNOTATIONS = frozenset(
    {"title", "description", "examples", "example", "default", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_OPENING = frozenset(
    {
        "additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "$dynamicRef", "allOf", "anyOf",
        "oneOf", "if", "dependentSchemas",
    }
)  # fmt: skip
"""Keywords that may allow properties which `properties` does not list."""
_OF_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
_OF_ONE = frozenset(
    {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems"}
)
_OF_A_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})


def argument_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema without annotations. Raise InvalidRequest if it is not the schema of an object.

    Unlisted properties become forbidden, although most schemas leave them open: no tool expects them.
    """
    if tool.parameters is None:
        return _NO_ARGUMENTS
    schema = _pruned(dict(tool.parameters), tool.field)
    if "x-guidance" in schema:
        raise Unsupported(f"{tool.field} has x-guidance, which is not supported here; remove it", field=tool.field)
    if not schema:
        return ANY_OBJECT
    if "type" not in schema and not _OPENING & schema.keys():
        schema = {"type": "object", **schema}
    if "object" not in _types(schema):
        raise InvalidRequest(
            f"{tool.field} of {tool.name} has the type {json.dumps(schema['type'])}; arguments must be an object",
            field=tool.field,
        )
    if schema.get("type") != "object" and "type" in schema:
        schema["type"] = "object"
    properties = schema.get("properties")
    if isinstance(properties, dict) and not _OPENING & schema.keys() and _all_listed(schema, properties):
        schema["additionalProperties"] = False
    return schema


def grammar_of(schema: Mapping[str, Any], tool: Tool) -> Grammar:
    """Return the grammar of one tool's arguments. Raise InvalidRequest if it is too long."""
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    except ValueError as error:
        raise InvalidRequest(f"{tool.field} of {tool.name}: {error}; make it smaller", field=tool.field) from error


def _all_listed(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    required = schema.get("required", [])
    return isinstance(required, list) and all(name in properties for name in required if isinstance(name, str))


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type", "object")
    return kinds if isinstance(kinds, list) else [kinds]


def loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without the keywords that a grammar most often cannot enforce. Its structure stays."""
    return dict(_without(_OFTEN_NOT_BUILT, schema))


def _pruned(schema: dict[str, Any], field: str) -> dict[str, Any]:
    try:
        return dict(_without(_ANNOTATIONS, schema))
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply; make it flatter", field=field) from error


def _without(keywords: Set[str], schema: Any) -> Any:
    """Return a schema without some keywords at any depth. Properties with these names stay."""
    if not isinstance(schema, dict):
        return schema
    return {key: _inside(keywords, key, value) for key, value in schema.items() if key not in keywords}


def _inside(keywords: Set[str], key: str, value: Any) -> Any:
    if key in _OF_SCHEMAS and isinstance(value, dict):
        return {name: _without(keywords, each) for name, each in value.items()}
    if key in _OF_A_LIST and isinstance(value, list):
        return [_without(keywords, each) for each in value]
    return _without(keywords, value) if key in _OF_ONE else value
