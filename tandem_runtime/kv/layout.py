"""Compares KV layouts, and refuses those that this build cannot move."""

from __future__ import annotations

import hashlib
from typing import Any

from google.protobuf.message import Message

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import FingerprintMismatch, InvalidRequest, Unsupported

DIGEST_BYTES = 16


def layout_digest(layout: pb.KvLayout) -> bytes:
    """Return 16 bytes that are equal for equal layouts; handles carry them."""
    return hashlib.blake2b(layout.SerializeToString(deterministic=True), digest_size=DIGEST_BYTES).digest()


def check_layout(ours: pb.KvLayout, theirs: pb.KvLayout) -> None:
    """Raise FingerprintMismatch naming the first field in which two layouts differ."""
    difference = _difference(ours, theirs, "layout")
    if difference is not None:
        field, our_value, their_value = difference
        raise FingerprintMismatch(f"KV layouts differ in {field}: {our_value} here, {their_value} there", field=field)


def check_supported(layout: pb.KvLayout) -> None:
    """Raise Unsupported, with the name, for layouts that the protocol knows and this build cannot move."""
    if not layout.groups:
        raise InvalidRequest("the KV layout has no groups", field="layout.groups")
    for index, group in enumerate(layout.groups):
        if group.kind not in (pb.KV_GROUP_KIND_FULL, pb.KV_GROUP_KIND_WINDOW):
            name = _name_of(pb.KvGroupKind, group.kind)
            raise Unsupported(
                f"KV group {index} is {name}; only KV_GROUP_KIND_FULL and KV_GROUP_KIND_WINDOW are built",
                field="layout.groups.kind",
            )
        if (group.kind == pb.KV_GROUP_KIND_WINDOW) != (group.window > 0):
            name = pb.KvGroupKind.Name(group.kind)
            raise InvalidRequest(f"KV group {index} is {name} with a window of {group.window}", field="layout.groups")
        if not group.bytes_per_block or not group.tokens_per_block or not group.layers:
            raise InvalidRequest(f"KV group {index} has no layers, tokens or bytes per block", field="layout.groups")
    if layout.shard.tp_size > 1:
        message = f"tp_size {layout.shard.tp_size}: sharded KV is not built, run with one rank"
        raise Unsupported(message, field="layout.shard.tp_size")


def check_memory_kind(extent: pb.Extent) -> None:
    """Raise Unsupported, with the name, for extents outside a shared-memory region."""
    if extent.kind != pb.MEMORY_KIND_HOST:
        name = _name_of(pb.MemoryKind, extent.kind)
        remedy = "start the prefill worker with --kv-region host"
        raise Unsupported(
            f"extent in {name}; only MEMORY_KIND_HOST is moved here: {remedy}", field="slabs.extents.kind"
        )


def _name_of(enum: Any, number: int) -> str:
    """Return the name of an enum's value. Enums of proto3 are open: a message may have numbers without a name."""
    return str(enum.Name(number)) if number in enum.values() else f"kind {number}"


def _difference(ours: Message, theirs: Message, path: str) -> tuple[str, object, object] | None:
    """Return (path, our value, their value) of the first differing field, in the order of the message's fields."""
    for descriptor in ours.DESCRIPTOR.fields:
        our_value, their_value = getattr(ours, descriptor.name), getattr(theirs, descriptor.name)
        if our_value == their_value:
            continue
        field = f"{path}.{descriptor.name}"
        if descriptor.message_type is None:
            return field, _plain(our_value), _plain(their_value)
        if isinstance(our_value, Message):
            return _difference(our_value, their_value, field)
        if len(our_value) != len(their_value):
            return field, f"{len(our_value)} items", f"{len(their_value)} items"
        pairs = zip(our_value, their_value, strict=True)
        return next(filter(None, (_difference(a, b, f"{field}[{i}]") for i, (a, b) in enumerate(pairs))), None)
    return None


def _plain(value: object) -> object:
    return value if isinstance(value, (int, str, bytes, bool)) else list(value)  # type: ignore[call-overload]
