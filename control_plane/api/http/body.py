"""Turns an HTTP body into a checked value, or into an error that names the field, its value and the remedy.

Plain code: it runs in text processes, without the gateway's database and server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticKnownError

from control_plane.api.http.bounds import (
    MAX_ARGUMENTS_BYTES,
    MAX_IGNORED_BYTES,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_SHOWN_CHARACTERS,
)
from control_plane.api.http.errors import BodyMissing
from tandem_runtime.errors import InvalidRequest, Unsupported


def _describe_extras(schema: dict[str, Any], model: type[Any]) -> None:
    """Add to a JSON Schema which fields are accepted without effect, and that no others are accepted."""
    names = sorted(model.harmless | model.for_clients)
    harmless = {name: {"description": "Taken, and changes nothing."} for name in names}
    schema["properties"] = {**schema.get("properties", {}), **harmless}
    schema["additionalProperties"] = False
    schema.update(model.json_schema_rules)


class Body(BaseModel):
    """A JSON object from a client. Values are not converted; unknown fields are kept for `refuse_extras`."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        json_schema_extra=_describe_extras,
        use_attribute_docstrings=True,
    )

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients send by habit, and that do not change the answer; `strict` refuses them."""
    for_clients: ClassVar[frozenset[str]] = frozenset()
    """Fields that the API has and that its clients themselves act on."""
    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields of other APIs that would change the answer; refused by name."""
    remedies: ClassVar[Mapping[str, str]] = {}
    """For some unsupported fields: what to send instead."""
    json_schema_rules: ClassVar[dict[str, Any]] = {}
    """Rules that the JSON Schema has besides the fields."""


def _object_or_text(value: Any) -> Any:
    if value is not None and not isinstance(value, dict | str):
        raise ValueError("must be an object, or an object as JSON text")
    check_json_bytes(value, MAX_ARGUMENTS_BYTES)
    return value


def at_most(maximum: int) -> BeforeValidator:
    """Return a validator that counts a list before its entries are checked, which would cost memory for nothing."""

    def count(value: Any) -> Any:
        if isinstance(value, list) and len(value) > maximum:
            limits = {"field_type": "List", "max_length": maximum, "actual_length": len(value)}
            raise PydanticKnownError("too_long", limits)
        return value

    return BeforeValidator(count)


ObjectOrText = Annotated[
    dict[str, Any] | str, BeforeValidator(_object_or_text, json_schema_input_type=dict[str, Any] | str)
]

Checked = TypeVar("Checked", bound=Body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raise InvalidRequest, also for one too deep or with too many parts."""
    if not raw or raw.isspace():
        raise BodyMissing("the request has no body; send a JSON object")
    try:
        value = _JSON.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is JSON, but {_show(value)} is not an object; send {{...}}")
    check_shape(value)
    return value


def check_shape(value: Any, what: str = "the body", field: str = "") -> None:
    """Raise InvalidRequest if lists and objects in `value` nest too deeply or are too many.

    Looks at one level after the other. A list or object without others in it costs no Python code per item.
    """
    level, depth, num_containers = [value], 1, 1
    while level:
        inner: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            if not _CONTAINERS.isdisjoint(map(type, items)):
                inner += [item for item in items if type(item) in _CONTAINERS]
        num_containers += len(inner)
        if num_containers > MAX_JSON_CONTAINERS:
            raise InvalidRequest(
                f"{what} has more than {MAX_JSON_CONTAINERS:,} lists and objects, which is the limit; send fewer",
                field=field,
            )
        if inner and depth == MAX_JSON_DEPTH:
            raise InvalidRequest(
                f"{what} nests lists and objects more than {MAX_JSON_DEPTH} levels deep, which is the limit; make it "
                "flatter",
                field=field,
            )
        level, depth = inner, depth + 1


_CONTAINERS = frozenset({dict, list})


def check_json_bytes(value: Any, max_bytes: int) -> Any:
    """Return `value`. Raise ValueError if a text, or a value as JSON, has more than `max_bytes`."""
    num_bytes = len(value.encode(errors="replace")) if isinstance(value, str) else len(msgspec.json.encode(value))
    if num_bytes > max_bytes:
        raise ValueError(f"has {num_bytes:,} bytes as JSON, the limit is {max_bytes:,}; make it smaller")
    return value


def check(model: type[Checked], value: Mapping[str, Any], *, at: str = "") -> Checked:
    """Build `model` from JSON values. Raise InvalidRequest naming the field, its value and what is expected.

    `at` is the prefix of the fields' names in messages, such as "options.".
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        message = "; ".join(_explain(problem, at) for problem in problems[:3])
        raise InvalidRequest(message, field=_path(problems[0]["loc"], at)) from error


def refuse_extras(body: Body, at: str = "", *, strict: bool = False) -> None:
    """Raise for unknown fields of `body` and of the objects in it, unless they are null or harmless.

    `strict` also refuses the harmless ones.

    A silently ignored field would change the answer without the caller's knowledge.
    """
    for name, value in (body.model_extra or {}).items():
        if value is None:
            continue
        if name in body.for_clients or name in body.harmless:
            if strict and name not in body.for_clients:
                field = f"{at}{name}"
                raise Unsupported(
                    f"{field} changes nothing here, and this gateway is strict; leave it out", field=field
                )
            _check_ignored(f"{at}{name}", value)
            continue
        if name in body.unsupported:
            if value in (False, [], {}, ""):  # these values ask for the default
                continue
            remedy = body.remedies.get(name, "leave it out")
            raise Unsupported(f"{at}{name} is not supported here; {remedy}", field=f"{at}{name}")
        shown = name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "..."
        near = get_close_matches(shown, list(type(body).model_fields), n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        raise InvalidRequest(f"{at}{shown} is not a field of this request; {remedy}", field=f"{at}{shown}")
    for place, inner in _inner_bodies(body, at):
        refuse_extras(inner, f"{place}.", strict=strict)


def _inner_bodies(body: Body, at: str) -> Iterator[tuple[str, Body]]:
    for name, value in vars(body).items():  # all fields of the class, most of them None
        if isinstance(value, Body):
            yield f"{at}{name}", value
        elif isinstance(value, list):
            yield from ((f"{at}{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Body))


def _check_ignored(field: str, value: Any) -> None:
    try:
        check_json_bytes(value, MAX_IGNORED_BYTES)
    except ValueError as error:
        raise InvalidRequest(f"{field} {error}", field=field) from error


def _number(literal: str) -> float:
    """Return 3.0 as 3: JSON has one number type, and JSON Schema counts both as integers."""
    number = float(literal)
    return int(number) if abs(number) < _MAX_EXACT and number.is_integer() else number


_MAX_EXACT = 2**53
_JSON = msgspec.json.Decoder(float_hook=_number)


_WORDS = {"model_type": "must be an object", "dict_type": "must be an object", "list_type": "must be a list"}
"""Replaces messages of pydantic that use Python's terms."""


def _explain(problem: Any, at: str) -> str:
    message = _WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    path, limits = _path(problem["loc"], at), problem.get("ctx", {})
    if problem["type"] == "missing":
        return f"{path} is missing; send it"
    if problem["type"] == "too_long":
        return f"{path} has {len(problem['input']):,} entries, the maximum is {limits['max_length']:,}; send fewer"
    if problem["type"] == "string_too_long":
        num = len(problem["input"])
        return f"{path} has {num:,} characters, the maximum is {limits['max_length']:,}; shorten it"
    return f"{path} {message}, got {_show(problem['input'])}" if path else message


def _path(location: tuple[int | str, ...], at: str = "") -> str:
    """Write ("messages", 0, "content") as messages[0].content."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return at + "".join(parts).lstrip(".")


def _show(value: Any) -> str:
    """Return the beginning of a value as JSON, without writing the rest of it."""
    text = ""
    for piece in _ENCODER.iterencode(value):
        text += piece[: MAX_SHOWN_CHARACTERS + 1]
        if len(text) > MAX_SHOWN_CHARACTERS:
            return text[:MAX_SHOWN_CHARACTERS] + "..."
    return text


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str, check_circular=False)
