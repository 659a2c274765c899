"""Bounds what workers and KV services say of themselves: every string, list, map and number of a registration.

The walk follows the descriptors of the messages, so a field that is added later has a bound too:

    name    a string: printable, at most 1,024 bytes. Names stand in logs, metrics and in terminals of operators
    text    a string listed in _TEXTS: any characters, at most as many bytes as listed
    bytes   at most 1,024
    list    at most 256 entries, or as many as listed in _LISTS; maps too
    float   from 0 to 1e24: predictions of the router are computed from them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import InvalidRequest

_ROLES = (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_KV, pb.WORKER_ROLE_ENCODE)
MAX_NAME_BYTES = 1024
MAX_ENTRIES = 256
MAX_REPORT_BYTES = 4 << 20
"""Of one LoadReport: 16,384 links, which is the most that a KV service may list."""
_MAX_NUMBER = 1e24
"""A terabyte a second makes so many bytes in 30,000 years; the router may multiply them."""
MAX_VALUES = 16_384
"""Of one output of an encoder. The largest embeddings have 8,192."""
_SMALL_REPORT_BYTES = 16 << 10
"""In a heartbeat's report of so few bytes nothing can be large: only its numbers are looked at."""

_TEXTS = {
    "tandem.v1.ModelCard.chat_template": 256 << 10,
    "tandem.v1.LoadReport.error": 64 << 10,
    "tandem.v1.LoadReport.load_stage": 4096,
    "tandem.v1.KvLink.note": 16 << 10,
    "tandem.v1.Device.error": 16 << 10,
    "tandem.v1.MemoryReport.source": 16 << 10,
    "tandem.v1.WorkerInfo.SettingsEntry.value": 16 << 10,
}
_LISTS = {
    "tandem.v1.EncoderCard.labels": 16_384,
    "tandem.v1.KvGroup.layers": 4096,
    "tandem.v1.KvServiceLoad.links": 16_384,
    "tandem.v1.LoadReport.counters": 4096,
    "tandem.v1.ModelCard.eos_token_ids": 1024,
    "tandem.v1.WorkerInfo.settings": 1024,
}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def check_info(info: pb.WorkerInfo) -> None:
    """Raise InvalidRequest with the field if a process describes itself out of bounds."""
    for name in ("worker_id", "incarnation", "address", "host_id"):
        if not getattr(info, name):
            raise InvalidRequest(f"info.{name} is empty; fill it in", field=f"info.{name}")
    if info.role not in _ROLES:
        raise InvalidRequest(f"info.role is {info.role}; set prefill, decode, encode or kv", field="info.role")
    _check(info, "info")
    if info.card.model_id:
        is_encoder = info.role == pb.WORKER_ROLE_ENCODE
        for name in ("context_length", "vocab_size", *(() if is_encoder else ("block_size",))):
            if not getattr(info.card, name):
                raise InvalidRequest(
                    f"info.card.{name} of {info.card.model_id!r} is 0; give the model's", field=f"info.card.{name}"
                )

        if is_encoder and not 0 < info.card.encoder.num_values <= MAX_VALUES:
            field = "info.card.encoder.num_values"
            num_values = info.card.encoder.num_values
            raise InvalidRequest(
                f"{field} of {info.card.model_id!r} is {num_values:,}; an encoder has 1 to {MAX_VALUES:,}", field=field
            )


def check_load(load: pb.LoadReport, *, is_first: bool = False) -> None:
    """Raise InvalidRequest with the field if a report is out of bounds; quick for all but the first."""
    num_bytes = load.ByteSize()
    if num_bytes > MAX_REPORT_BYTES:
        raise InvalidRequest(f"load has {num_bytes:,} bytes, at most {MAX_REPORT_BYTES:,} are read", field="load")
    if is_first or num_bytes > _SMALL_REPORT_BYTES:
        _check(load, "load")
        return
    counters = load.counters
    _check_floats("load.counters", [*map(counters.__getitem__, counters)])  # values() takes twice as long
    if load.HasField("kv_service"):
        for link in load.kv_service.links:
            rates = [link.bytes_per_second, link.best_bytes_per_second, link.latency_ms, link.bytes_per_run]
            _check_floats("load.kv_service.links", rates)


def check_name(value: str, path: str) -> None:
    """Raise InvalidRequest for a string that is no name."""
    num_bytes = len(value.encode())
    if num_bytes > MAX_NAME_BYTES:
        raise InvalidRequest(f"{path} has {num_bytes:,} bytes, at most {MAX_NAME_BYTES:,} are accepted", field=path)
    if not value.isprintable():
        raise InvalidRequest(f"{path} has a character that cannot be printed; leave it out", field=path)


def _check(message: Message, path: str) -> None:
    for field, value in message.ListFields():
        inner = f"{path}.{field.name}"
        if not field.is_repeated:
            _check_value(field, value, inner)
            continue
        limit = _LISTS.get(field.full_name, MAX_ENTRIES)
        if len(value) > limit:
            raise InvalidRequest(f"{inner} has {len(value):,} entries, at most {limit:,} are accepted", field=inner)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, content = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for name in value:
                _check_value(key, name, inner)
                _check_value(content, value[name], inner)
        else:
            for entry in value:
                _check_value(field, entry, inner)


def _check_value(field: FieldDescriptor, value: Any, path: str) -> None:
    if isinstance(value, Message):
        _check(value, path)
    elif isinstance(value, str):
        limit = _TEXTS.get(field.full_name)
        if limit is None:
            check_name(value, path)
        elif len(value.encode()) > limit:
            raise InvalidRequest(
                f"{path} has {len(value.encode()):,} bytes, at most {limit:,} are accepted", field=path
            )
    elif isinstance(value, bytes):
        if len(value) > MAX_NAME_BYTES:
            raise InvalidRequest(
                f"{path} has {len(value):,} bytes, at most {MAX_NAME_BYTES:,} are accepted", field=path
            )
    elif field.cpp_type in _FLOATS:
        _check_floats(path, [value])


def _check_floats(path: str, values: Sequence[float]) -> None:
    if not values or (sum(values) <= _MAX_NUMBER and min(values) >= 0):  # sum() keeps what is not a number
        return
    for value in values:
        if not 0 <= value <= _MAX_NUMBER:  # neither is true of what is not a number
            raise InvalidRequest(f"{path} is {value}; give a number from 0 to {_MAX_NUMBER:g}", field=path)
