"""Finds the files of the requested model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tandem_engine.errors import ModelUnusable

DEMO_MODEL = "@tandem/demo"
_PATTERNS = ("*.safetensors", "*.json", "*.jinja")

Progress = Callable[[str, float], None]
"""Takes a sentence for people and the progress of loading, from 0 to 1."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with all files of a model, and the name to serve the model under."""

    model_id: str
    folder: Path

    @property
    def weight_files(self) -> list[Path]:
        return weight_files(self.folder)

    @property
    def num_weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weight_files)

    @cached_property
    def tensor_shapes(self) -> dict[str, list[int]]:
        """The shape of each stored tensor; only the files' headers are read. Raises ModelUnusable."""
        shapes: dict[str, list[int]] = {}
        for path in self.weight_files:
            file: Any
            try:
                with safe_open(path, framework="np") as file:
                    shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
            except SafetensorError as error:
                raise ModelUnusable(f"{path} cannot be read: {error}; download the checkpoint anew") from error
        return shapes

    @property
    def assets(self) -> dict[str, str]:
        """Return the tokenizer's files: name -> path."""
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: str(self.folder / name) for name in names if (self.folder / name).exists()}


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads; other files may repeat the same weights under other names (Mistral).

    Raises ModelUnusable if their index is broken or names missing files.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnusable(f"{index} is no index of weights ({error!r}); download the checkpoint anew") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelUnusable(f"{folder} lacks {len(missing)} files, {missing[0]} first; download the checkpoint anew")
    return [folder / name for name in names]


def find_checkpoint(model: str, served_model_name: str, report: Progress, revision: str = "") -> Checkpoint:
    """Return the files of a folder, of a Hub id (downloaded if missing) or of "@tandem/demo"; raises ModelUnusable.

    `revision` is a branch, tag or commit of a Hub id, "" its main branch. A folder takes no revision.
    """
    folder, default_name = _locate(model, revision, report)
    _check_files(folder)
    return Checkpoint(served_model_name or default_name, folder)


def _locate(model: str, revision: str, report: Progress) -> tuple[Path, str]:
    if revision and (model == DEMO_MODEL or Path(model).expanduser().is_dir()):
        raise ModelUnusable(f"{model} has no revisions, and {revision!r} was requested; leave it out, or give a Hub id")
    if model == DEMO_MODEL:
        from tandem_engine.demo import checkpoint_path

        return Path(checkpoint_path()), DEMO_MODEL
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve(), folder.resolve().name
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelUnusable(f"{model} is not a folder")
    return _download(model, revision, report), model


def _download(model: str, revision: str, report: Progress) -> Path:
    """Fetch safetensors and JSON from the Hub, with its progress bars on stderr; HF_HUB_OFFLINE=1 is honoured."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report(f"looking for {model} on the Hugging Face Hub", 0.0)
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        where = f"{model} at {revision}" if revision else model
        raise ModelUnusable(
            f"{where} is neither a local folder nor a model that the Hugging Face Hub returned "
            f"({type(error).__name__}: {error}); check the name, the network, HF_HUB_OFFLINE and HF_TOKEN"
        ) from error


def _check_files(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ModelUnusable(f"{folder} has no config.json; the folder is not a transformers checkpoint")
    if not list(folder.glob("*.safetensors")):
        raise ModelUnusable(
            f"{folder} has no safetensors files; pickled weights (.bin) can run code and are not loaded: convert them "
            "with `model.save_pretrained(folder, safe_serialization=True)`"
        )
    if not (folder / "tokenizer.json").exists():
        raise ModelUnusable(
            f"{folder} has no tokenizer.json; make one with "
            "`AutoTokenizer.from_pretrained(folder, use_fast=True).save_pretrained(folder)`"
        )
