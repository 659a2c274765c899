"""Finds LoRA adapters in the format of peft: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tandem_engine.errors import ModelUnusable

_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterFiles(NamedTuple):
    """An adapter on this machine."""

    name: str
    folder: Path
    digest: str
    """Hex, BLAKE2b of 16 bytes over its two files."""
    rank: int


def find_adapters(entries: Sequence[str]) -> list[AdapterFiles]:
    """Return the adapters of NAME=PATH entries, sorted by name; raises ModelUnusable naming the entry."""
    found = sorted(map(_found, entries))
    names = [each.name for each in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ModelUnusable(f"--adapters names {', '.join(sorted(twice))} twice; give each adapter a name of its own")
    return found


def _found(entry: str) -> AdapterFiles:
    name, _, path = entry.partition("=")
    folder = Path(path).expanduser()
    if not path or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ModelUnusable(
            f"--adapters has {entry[:120]!r}; write NAME=PATH, the name of up to 64 letters, digits, dots, hyphens and "
            "underscores"
        )
    if missing := [file for file in _FILES if not (folder / file).is_file()]:
        raise ModelUnusable(
            f"adapter {name}: {folder} has no {' and no '.join(missing)}; save it with peft's save_pretrained, which "
            "writes safetensors"
        )
    digest = hashlib.blake2b(digest_size=16)
    for file in _FILES:
        with (folder / file).open("rb") as content:
            digest.update(hashlib.file_digest(content, hashlib.blake2b).digest())
    return AdapterFiles(name, folder, digest.hexdigest(), _rank(name, folder / _FILES[0]))


def _rank(name: str, config: Path) -> int:
    try:
        values = json.loads(config.read_bytes())
        rank = max(values["r"], *values.get("rank_pattern", {}).values(), 1)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelUnusable(f"adapter {name}: {config.name} has no rank r of LoRA: {error!r}") from error
    return int(rank)
