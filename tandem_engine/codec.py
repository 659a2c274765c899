"""How does a frozen dataclass become JSON, and back, strictly?

A message is `{"ClassName": {field: value, ...}}`; values inside follow the declared types of their fields, so nested
dataclasses carry no tag. An encoder and a decoder per type are made once from the type hints. Unknown classes and
fields, missing fields without a default, and wrong types raise CodecError that names the path.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

Encode = Callable[[Any], Any]
Decode = Callable[[Any, str], Any]


class CodecError(ValueError):
    """Bytes that are no message, or a message that is none of ours."""


class Codec:
    """Encodes and decodes the given dataclasses."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._by_name = {kind.__name__: kind for kind in classes}

    def encode(self, message: object) -> bytes:
        kind: Any = type(message)
        name = kind.__name__
        if self._by_name.get(name) is not kind:
            raise CodecError(f"{name} is not a message of this channel")
        return json.dumps({name: _encoder_of(kind)(message)}, separators=(",", ":")).encode()

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        try:
            tagged = json.loads(bytes(data))
        except ValueError as error:
            raise CodecError(f"a frame of {len(data)} bytes is not JSON: {error}") from error
        if not isinstance(tagged, dict) or len(tagged) != 1:
            raise CodecError('a message is {"ClassName": {...}}')
        ((name, body),) = tagged.items()
        if name not in self._by_name:
            raise CodecError(f"{name!r} is not a message of this channel")
        return _decoder_of(self._by_name[name])(body, name)


def _same(value: Any) -> Any:
    return value


@cache
def _encoder_of(kind: Any) -> Encode:
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(cast(type, kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        item = _encoder_of(arguments[0])
        return _same if item is _same else lambda values: [item(value) for value in values]
    if _is_mapping(origin):
        item = _encoder_of(arguments[1])
        return dict if item is _same else lambda values: {key: item(value) for key, value in values.items()}
    if origin in (types.UnionType, Union):
        inner = _encoder_of(_without_none(arguments))
        return _same if inner is _same else lambda value: None if value is None else inner(value)
    return _same


def _dataclass_encoder(kind: type) -> Encode:
    hints = get_type_hints(kind)
    fields = [(field.name, _encoder_of(hints[field.name])) for field in dataclasses.fields(kind)]
    plain = [name for name, encode in fields if encode is _same]
    nested = [(name, encode) for name, encode in fields if encode is not _same]

    def encode_fields(value: Any) -> dict[str, Any]:
        known = value.__dict__
        body = {name: known[name] for name in plain}
        for name, encode in nested:
            body[name] = encode(known[name])
        return body

    return encode_fields


@cache
def _decoder_of(kind: Any) -> Decode:
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(cast(type, kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        return _sequence_decoder(origin, arguments[0])
    if _is_mapping(origin):
        return _mapping_decoder(*arguments)
    if origin in (types.UnionType, Union):
        inner = _decoder_of(_without_none(arguments))
        return lambda value, path: None if value is None else inner(value, path)
    if origin is Literal:
        return _literal_decoder(arguments)
    if kind in (int, str, bool):
        return _exact_decoder(kind)
    if kind is float:
        return _float
    raise TypeError(f"no JSON form for {kind}")  # a mistake in a message class, found by its first use in a test


def _dataclass_decoder(kind: type) -> Decode:
    hints = get_type_hints(kind)
    decoders = {field.name: _decoder_of(hints[field.name]) for field in dataclasses.fields(kind)}
    required = {field.name for field in dataclasses.fields(kind) if _has_no_default(field)}

    def decode_fields(body: Any, path: str) -> Any:
        if not isinstance(body, dict):
            raise CodecError(f"{path} is {type(body).__name__}, must be an object")
        if unknown := body.keys() - decoders.keys():
            raise CodecError(f"{path} has unknown fields: {sorted(unknown)}")
        if missing := required - body.keys():
            raise CodecError(f"{path} lacks fields: {sorted(missing)}")
        try:
            return kind(**{name: decoders[name](value, f"{path}.{name}") for name, value in body.items()})
        except CodecError:
            raise
        except ValueError as error:
            raise CodecError(f"{path}: {error}") from error

    return decode_fields


def _sequence_decoder(origin: type, item_type: Any) -> Decode:
    item = _decoder_of(item_type)

    def decode_items(values: Any, path: str) -> Any:
        if type(values) is not list:
            raise CodecError(f"{path} is {type(values).__name__}, must be an array")
        if item_type is int or item_type is str:  # token ids, hashes: check without a call per item
            if not all(type(value) is item_type for value in values):
                raise CodecError(f"{path} must hold only {item_type.__name__}")
            return origin(values)
        return origin(item(value, f"{path}[]") for value in values)

    return decode_items


def _mapping_decoder(key_type: Any, item_type: Any) -> Decode:
    item = _decoder_of(item_type)

    def decode_mapping(values: Any, path: str) -> Any:
        if not isinstance(values, dict):
            raise CodecError(f"{path} is {type(values).__name__}, must be an object")
        try:
            return {key_type(key): item(value, f"{path}[{key}]") for key, value in values.items()}
        except CodecError:
            raise
        except ValueError as error:
            raise CodecError(f"{path}: {error}") from error

    return decode_mapping


def _literal_decoder(allowed: tuple[Any, ...]) -> Decode:
    def decode_literal(value: Any, path: str) -> Any:
        if value not in allowed:
            raise CodecError(f"{path} is {value!r}, must be one of {list(allowed)}")
        return value

    return decode_literal


def _exact_decoder(kind: type) -> Decode:
    def decode_exact(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise CodecError(f"{path} is {type(value).__name__}, must be {kind.__name__}")
        return value

    return decode_exact


def _float(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise CodecError(f"{path} is {type(value).__name__}, must be a number")
    return float(value)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _without_none(arguments: tuple[Any, ...]) -> Any:
    rest = [argument for argument in arguments if argument is not type(None)]
    assert len(rest) == 1, "a union in a message is X | None"
    return rest[0]


def _has_no_default(field: dataclasses.Field[typing.Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
