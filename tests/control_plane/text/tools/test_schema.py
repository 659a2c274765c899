"""The schema that a grammar enforces for a tool's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.text.tool import Tool
from control_plane.text.tools.schema import argument_schema
from tandem_runtime.errors import InvalidRequest

TEXT = {"type": "string"}


def schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    return argument_schema(Tool("get", "", parameters, field="tools[0].parameters"))


@pytest.mark.parametrize(
    ("parameters", "held_to"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object"}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"a": TEXT}}, {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        (
            {"type": ["object", "null"], "properties": {"a": TEXT}, "additionalProperties": TEXT},
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
        ),
        (
            {"type": "object", "properties": {"a": TEXT}, "required": ["b"]},
            {"type": "object", "properties": {"a": TEXT}, "required": ["b"]},
        ),
        ({"anyOf": [{"type": "object"}]}, {"anyOf": [{"type": "object"}]}),
    ],
)
def test_arguments_are_an_object_without_surplus(parameters: dict[str, Any] | None, held_to: dict[str, Any]) -> None:
    assert schema(parameters) == held_to


def test_what_only_people_read_is_left_out_and_properties_of_such_names_are_not() -> None:
    description = {"type": "string", "description": "What it is", "enum": ["title"], "default": "title"}
    parameters = {
        "title": "Get",
        "type": "object",
        "properties": {"description": description, "list": {"type": "array", "items": description}},
        "$defs": {"title": description},
        "required": ["description"],
    }
    bare = {"type": "string", "enum": ["title"]}
    assert schema(parameters) == {
        "type": "object",
        "properties": {"description": bare, "list": {"type": "array", "items": bare}},
        "$defs": {"title": bare},
        "required": ["description"],
        "additionalProperties": False,
    }


def test_parameters_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r'tools\[0\].parameters of get has the type "string"'):
        schema({"type": "string"})
