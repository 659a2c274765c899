"""Parses the text of a flag, a variable or a TOML value into a setting's Python value."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_YES = {"1", "true", "yes", "on"}
_NO = {"0", "false", "no", "off"}


def from_text(kind: Any, text: str) -> Any:
    """Read `text` as `kind`; raises ValueError with the accepted form."""
    if (inner := optional_of(kind)) is not None:
        return None if text == "" else from_text(inner, text)
    if is_list(kind):
        items = [from_text(get_args(kind)[0], item.strip()) for item in text.split(",") if item.strip()]
        return _container(kind)(items)
    if get_origin(kind) is Literal:
        return _choice(kind, text)
    return _READERS[kind](text)


def from_toml(kind: Any, value: Any) -> Any:
    """Check that a TOML value fits `kind`; raises ValueError with the accepted form."""
    if (inner := optional_of(kind)) is not None:
        return from_toml(inner, value)
    if is_list(kind):
        if not isinstance(value, list):
            raise ValueError("give a list, like [a, b]")
        return _container(kind)(from_toml(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is Literal:
        return _choice(kind, value)
    if hasattr(kind, "from_toml"):
        return kind.from_toml(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    if type(value) is not kind:
        raise ValueError(f"give {_ARTICLES[kind]}")
    return value


def placeholder(kind: Any) -> str:
    """Return the placeholder that `--help` shows for the value."""
    if (inner := optional_of(kind)) is not None:
        return placeholder(inner)
    if is_list(kind):
        return f"{placeholder(get_args(kind)[0])},..."
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    return _PLACEHOLDERS[kind]


def optional_of(kind: Any) -> Any:
    """Return X of `X | None`, None for anything else."""
    if get_origin(kind) not in (Union, types.UnionType):
        return None
    others = [part for part in get_args(kind) if part is not type(None)]
    assert len(others) == 1, f"a setting is of one type, or that and None; not {kind}"
    return others[0]


def is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _container(kind: Any) -> Callable[[Any], Any]:
    return list if get_origin(kind) is list else tuple


def _choice(kind: Any, value: Any) -> Any:
    for choice in get_args(kind):
        if value == choice or value == str(choice):
            return choice
    raise ValueError("choose one of " + ", ".join(str(choice) for choice in get_args(kind)))


def _read_bool(text: str) -> bool:
    if text.strip().lower() in _YES:
        return True
    if text.strip().lower() in _NO:
        return False
    raise ValueError("give true or false")


def _read_int(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ValueError("give a whole number") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number") from None


_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    Path: lambda text: Path(text).expanduser(),
}
_PLACEHOLDERS = {str: "TEXT", bool: "BOOL", int: "N", float: "NUMBER", Path: "PATH"}
_ARTICLES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", Path: "a path as text"}
