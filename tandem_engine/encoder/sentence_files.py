"""Reads the files that sentence-transformers keeps beside a checkpoint: modules, pooling, longest text.

modules.json                  the modules in order, each with a type and a folder
1_Pooling/config.json         the pooling
sentence_bert_config.json     max_seq_length
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_engine.encoder.messages import Pooling
from tandem_engine.errors import ModelUnusable

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMED_MODES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Of files with one entry, "pooling_mode"."""
_BUILT = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class SentenceFiles:
    """What the files of sentence-transformers say."""

    pooling: Pooling
    is_normalized: bool
    max_tokens: int | None
    """Longest text, special tokens included; None: the checkpoint's positions."""


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Return what the files say; None without modules.json. Raises ModelUnusable for modules that are not built."""
    modules = _read(folder / "modules.json", list)
    if modules is None:
        return None
    folders = {_kind(module, folder): str(module.get("path", "")) for module in modules}
    if list(folders) not in (list(_BUILT), list(_BUILT[:2])):
        raise ModelUnusable(
            f"{folder / 'modules.json'} names the modules {', '.join(folders)}; built are {', '.join(_BUILT)}, in this "
            "order, the last one optional: choose another model"
        )
    if folders["Transformer"]:
        raise ModelUnusable(
            f"{folder / 'modules.json'} keeps the transformer in {folders['Transformer']}; move its files to {folder} "
            "and save the path as empty"
        )
    return SentenceFiles(_pooling(folder / folders["Pooling"] / "config.json"), "Normalize" in folders, _length(folder))


def _kind(module: Any, folder: Path) -> str:
    try:
        return str(module["type"]).rpartition(".")[2]
    except (TypeError, KeyError) as error:
        raise _damaged(folder / "modules.json", repr(error)) from error


def _pooling(path: Path) -> Pooling:
    config = _read(path, dict)
    if config is None:
        raise ModelUnusable(f"{path} is missing; download the checkpoint anew")
    if config.get("include_prompt") is False:
        raise ModelUnusable(f"{path} leaves prompts out of the pooling (include_prompt); that is not built")
    if mode := config.get("pooling_mode"):
        modes, built = [str(mode)], _NAMED_MODES
    else:
        modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        built = _MODES
    if len(modes) != 1 or modes[0] not in built:
        raise ModelUnusable(
            f"{path} has {' and '.join(modes) or 'no pooling mode'}; built is one of {', '.join(built)}: "
            "choose another model"
        )
    return built[modes[0]]


def _length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    config = _read(path, dict) or {}
    if config.get("do_lower_case") and '"lowercase":true' not in _compact(folder / "tokenizer.json"):
        raise ModelUnusable(
            f"{path} asks for lower case (do_lower_case), but the tokenizer keeps capitals; that is not built: choose "
            "another model"
        )
    length = config.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise _damaged(path, f"max_seq_length is {length!r}")
    return length


def _compact(path: Path) -> str:
    return json.dumps((_read(path, dict) or {}).get("normalizer"), separators=(",", ":"))


def _read(path: Path, kind: type) -> Any:
    """Return the JSON value of a file; None if there is no file."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(value, kind):
        raise _damaged(path, f"it has a {type(value).__name__}")
    return value


def _damaged(path: Path, what: str) -> ModelUnusable:
    return ModelUnusable(f"{path} cannot be read: {what}; download the checkpoint anew")
