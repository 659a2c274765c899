"""Does a wrangler file give its settings values of the kind that they take?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_Shape = Any
"""str; [shape of the items]; or {name: shape}, where `*` is any other name and `!` behind one means that it must be."""

_SETTINGS: dict[str, _Shape] = {
    "name": str,
    "main": str,
    "compatibility_date": str,
    "compatibility_flags": [str],
    "rules": [{"type!": str, "globs!": [str]}],
    "ai": {"binding!": str},
    "vars": {},
    "assets": {"directory": str, "binding": str},
    "secrets": {},
    "define": {"*": str},
    "alias": {"*": str},
    "tsconfig": str,
    "jsx_factory": str,
    "jsx_fragment": str,
    "env": {"*": {}},
}
_WORDS: dict[type, str] = {str: "a text in quotes", list: "a list", dict: "a table"}


def complaints(said: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong: which setting, what it has and what it takes. Settings that are not read may be anything."""
    for name, value in said.items():
        if name in _SETTINGS:
            yield from _complaints(name, value, _SETTINGS[name])


def _complaints(at: str, value: Any, shape: _Shape) -> Iterator[str]:
    kind: type = str if shape is str else type(shape)
    fits = isinstance(value, kind)
    if not fits:
        yield f"{at} is {_shown(value)}; it must be {_WORDS[kind]}"
    elif isinstance(shape, list):
        for index, item in enumerate(value):
            yield from _complaints(f"{at}[{index}]", item, shape[0])
    elif isinstance(shape, dict):
        yield from (f"{at} has no {name[:-1]}; add it" for name in shape if name[-1] == "!" and name[:-1] not in value)
        for name, item in value.items():
            inner = shape.get(name, shape.get(f"{name}!", shape.get("*")))
            if inner is not None:
                yield from _complaints(f"{at}.{name}", item, inner)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except TypeError:  # a date of TOML
        text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
