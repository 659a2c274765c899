"""Draws random JSON Schemas whose instances have bounded length."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "städte", "is ok", 'with "quotes"', "n", "tags", "x_1")
_MAX_DEPTH = 2


def random_schema(chance: random.Random) -> dict[str, Any]:
    """Return a schema whose longest instance has some 250 characters."""
    return _object(chance, 0)


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _text, _integer, _number, _choice, _pattern, _simple, _either]
    if depth < _MAX_DEPTH:
        kinds += [_object, _array]
    return chance.choice(kinds)(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(0 if depth else 1, 3 - depth))
    properties = {name: _value(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {"type": "array", "items": _value(chance, _MAX_DEPTH), "minItems": least, "maxItems": least + 1}


def _text(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 5)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 2000)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": chance.choice([1, 2.5, 10])}


def _choice(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": chance.sample(["red", "grün", 7, -1, True, None, "a b"], chance.randint(1, 4))}


def _pattern(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": chance.choice(["^[a-z]{1,4}$", "^[0-9]{2}-[A-F]{2}$", "^(ab?|c)d$"])}


def _simple(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [{"type": "boolean"}, {"type": "null"}, {"const": "x"}]
    return chance.choice([*kinds, {"type": "string", "format": "ipv4"}])


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "boolean"}, _integer(chance, depth), _text(chance, depth)]}
