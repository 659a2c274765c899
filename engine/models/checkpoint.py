"""Where are the files of the model that was asked for?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEMO_MODEL = "@tandem/demo"
_PATTERNS = ("*.safetensors", "*.json", "*.jinja")

Progress = Callable[[str, float], None]
"""Takes a sentence for people, and how far loading is, from 0 to 1."""


class ModelUnusable(ValueError):
    """This checkpoint cannot be served; the message says why, and what to do instead."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with all that is needed, and the name to serve it under."""

    model_id: str
    folder: Path

    @property
    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @property
    def num_weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weight_files)

    @property
    def assets(self) -> dict[str, str]:
        """Name -> path of the files that a tokenizer is made of."""
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: str(self.folder / name) for name in names if (self.folder / name).exists()}


def find_checkpoint(model: str, served_model_name: str, report: Progress) -> Checkpoint:
    """Return the files of a folder, a Hub id (downloaded if need be) or "@tandem/demo"; raises ModelUnusable."""
    folder, default_name = _locate(model, report)
    _check_files(folder)
    return Checkpoint(served_model_name or default_name, folder)


def _locate(model: str, report: Progress) -> tuple[Path, str]:
    if model == DEMO_MODEL:
        from engine.demo import checkpoint_path

        return Path(checkpoint_path()), DEMO_MODEL
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve(), folder.resolve().name
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelUnusable(f"{model} is not a folder")
    return _download(model, report), model


def _download(model: str, report: Progress) -> Path:
    """Fetch safetensors and JSON from the Hub, with its progress bars on stderr; HF_HUB_OFFLINE=1 is honoured."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report(f"looking for {model} on the Hugging Face Hub", 0.0)
    try:
        return Path(snapshot_download(model, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnusable(
            f"{model} is neither a folder here nor a model that the Hugging Face Hub gave us "
            f"({type(error).__name__}: {error}); check the name, the network, HF_HUB_OFFLINE and HF_TOKEN"
        ) from error


def _check_files(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ModelUnusable(f"{folder} has no config.json; it is not a transformers checkpoint")
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
