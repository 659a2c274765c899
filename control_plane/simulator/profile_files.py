"""Reads a fleet's profile from a JSON file: the fields of FleetProfile, and those of WorkerProfile for each role."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from control_plane.simulator.profiles import FleetProfile, WorkerProfile


class BadProfile(ValueError):
    """A profile cannot be read; the message names the field."""


def read_profile(path: Path) -> FleetProfile:
    """Return the fleet of a file; raises BadProfile. `decode` may be left out where it equals `prefill`."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        entries.setdefault("decode", entries["prefill"])
        roles = {role: WorkerProfile(**_known(WorkerProfile, entries[role])) for role in ("prefill", "decode")}
        entries |= {name: tuple(entries.get(name, ())) for name in ("cores", "models")}
        return FleetProfile(**_known(FleetProfile, {**entries, **roles}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadProfile(f"{path.name} is no fleet profile: {error}") from error


def written(profile: FleetProfile) -> str:
    """Return the JSON of a profile."""
    return json.dumps(asdict(profile), indent=2)


def _known(kind: type[WorkerProfile] | type[FleetProfile], entries: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    if unknown := sorted(entries.keys() - names):
        raise ValueError(f"no field {unknown[0]!r} of {kind.__name__}; its fields are {', '.join(sorted(names))}")
    return entries
