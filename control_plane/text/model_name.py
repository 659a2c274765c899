"""Finds the model's name in a raw body, without parsing it: for refusals that must cost less than the parsing."""

from __future__ import annotations

import json
import re

_HEAD_BYTES = 65_536
_MODEL = re.compile(rb'(?<!\\)"model"\s*:\s*("(?:[^"\\]|\\.)*")')
"""A key of an object; in a text the quotes have backslashes before them."""
_TIER = re.compile(rb'(?<!\\)"service_tier"\s*:')


def model_named_in(raw: bytes) -> str | None:
    """Return the name that a JSON body of at most 64 KiB gives for its model; None: only parsing can tell.

    So it is with a larger body, with several keys `model`, and with a body that asks for a class of its own.
    """
    if len(raw) > _HEAD_BYTES or _TIER.search(raw):
        return None
    found = _MODEL.findall(raw)
    if len(found) != 1:
        return None
    try:
        name = json.loads(found[0])
    except ValueError:
        return None
    return name if isinstance(name, str) else None
