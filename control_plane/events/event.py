"""One event of the fleet, as the API, the database and the page have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from control_plane.events.kinds import KINDS, Kind, Severity

MAX_TEXT_CHARACTERS = 300
_MAX_NAME_CHARACTERS = 128
_MAX_CAUSE_CHARACTERS = 64
_MAX_FIELDS = 12
_LARGEST = 2**63
"""Greater numbers are written as text: not every reader of JSON can hold them."""
_NAMES = ("role", "worker", "host", "model", "request_id")
"""What an event may be about."""
_WORKERS = ("worker", "to", "service")
"""Values that are ids of workers; a message has their names."""


@dataclass(frozen=True)
class Event:
    kind: str
    severity: Severity
    time_ms: int
    """Unix time."""
    message: str
    cause: str = ""
    """A word of a bounded set."""
    role: str = ""
    worker: str = ""
    host: str = ""
    model: str = ""
    request_id: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    gateway: str = ""
    """The incarnation of the gateway that saw it."""
    id: int = 0
    """Its number in the database, in the order of commits; 0 while it has none."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "time_ms": self.time_ms,
            "kind": self.kind,
            "severity": self.severity,
            "gateway": self.gateway,
            "role": self.role,
            "worker": self.worker,
            "host": self.host,
            "model": self.model,
            "request_id": self.request_id,
            "cause": self.cause,
            "message": self.message,
            "fields": dict(self.fields),
        }


def new_event(
    kind: str,
    time_ms: int,
    values: Mapping[str, Any],
    *,
    gateway: str = "",
    name_of: Callable[[str], str] = str,
) -> Event:
    """Return an event of a kind of the table. `values` has what the message names, and what the event is about.

    `name_of` returns what operators call the worker with an id. With `repeated`, this is the sum of so many.
    Long texts are cut, and values that are no number or text are written as text.
    """
    found = KINDS[kind]
    values = {name: _plain(value) for name, value in values.items()}
    names = {name: _text(values.pop(name, ""), _MAX_NAME_CHARACTERS) for name in _NAMES}
    cause_field = found.cause or "cause"
    cause = _text(values.pop(cause_field, ""), _MAX_CAUSE_CHARACTERS)
    fields = dict(list(values.items())[:_MAX_FIELDS])
    if names["worker"]:
        fields["name"] = _text(name_of(names["worker"]), _MAX_NAME_CHARACTERS)
    return Event(
        kind,
        found.severity,
        time_ms,
        _message(found, {**values, **names, cause_field: cause}, name_of)[:MAX_TEXT_CHARACTERS],
        cause,
        role=names["role"],
        worker=names["worker"],
        host=names["host"],
        model=names["model"],
        request_id=names["request_id"],
        fields=fields,
        gateway=gateway,
    )


def _message(kind: Kind, values: Mapping[str, Any], name_of: Callable[[str], str]) -> str:
    role = values["role"]
    shown = {name: _shown(value) for name, value in values.items()}
    shown |= {name: _text(name_of(str(values.get(name, ""))), _MAX_NAME_CHARACTERS) for name in _WORKERS}
    shown["what"] = "KV service" if role == "kv" else f"{role} worker".strip()
    message = kind.message.format_map(_Blank(shown))
    if repeated := values.get("repeated"):
        message += f"; {repeated:,} such events within {kind.window_seconds:g} s"
    return message


class _Blank(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < _LARGEST):
        return value
    return _text(value, MAX_TEXT_CHARACTERS)


def _text(value: Any, max_characters: int) -> str:
    """Return a value as one line of text for JSON, databases and terminals: no control and no half characters."""
    text = str(value)[:max_characters].encode(errors="replace").decode()
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)
