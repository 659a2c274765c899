"""Each of Workers AI's names leads to a checkpoint that loads, or to the sentence why not that docs/models.md has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tandem_engine.encoder.load import load_encoder
from tandem_engine.errors import ModelUnusable
from tandem_engine.models.loader import load_model
from tandem_engine.settings import EngineConfig
from tandem_runtime.model_table import SHIPPED, ModelEntry
from tests.checkpoints import byte_level_tokenizer
from tests.tandem_engine.encoder.published import ENCODERS
from tests.tandem_engine.models.published import CONFIGS

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


def _rows() -> dict[str, tuple[str, ...]]:
    """Return the cells of the page's table by Workers AI's name."""
    rows = [line.strip("| \n").split(" | ") for line in _PAGE.read_text().splitlines() if line.startswith("| `@")]
    return {cells[0].strip("`"): tuple(cells[1:]) for cells in rows}


def _made(folder: Path, config: Any) -> Path:
    """Save a random checkpoint of a configuration; of one that transformers has no text model for, only config.json."""
    torch.manual_seed(4)
    byte_level_tokenizer().save_pretrained(folder)
    has_tower = getattr(config, "vision_config", None) is not None
    has_weights = getattr(config, "quantization_config", None) is None and config.model_type not in ("llama4", "gemma4")
    if has_weights:
        whole = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
        whole.from_config(config, dtype=torch.float32).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
        AutoModelForCausalLM.from_config(CONFIGS["microsoft/phi-2"]()).save_pretrained(folder / "other")
        (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")
    return folder


def _outcome(folder: Path) -> str:
    try:
        loaded = load_model(EngineConfig(str(folder), device="cpu", num_threads=1), lambda *_: None)
    except ModelUnusable as error:
        return "no: " + str(error).partition(" ")[2].partition(";")[0]
    return "yes" if loaded.is_batch_invariant else "yes, by transformers' code"


def encoder_outcome(make: Callable[[Path], object], folder: Path) -> str:
    make(folder)
    try:
        loaded = load_encoder(EngineConfig(str(folder), device="cpu", num_threads=1, encodes=True), lambda *_: None)
    except ModelUnusable as error:
        return "no: " + str(error).partition(" ")[2].partition(";")[0]
    return f"yes: {loaded.encoder.info.task}"


def test_the_page_has_every_name_with_its_checkpoint() -> None:
    assert {name: cells[0].strip("`") for name, cells in _rows().items()} == {
        entry.name: entry.source for entry in SHIPPED.entries
    }


@pytest.mark.parametrize("entry", SHIPPED.entries, ids=lambda entry: entry.name.rpartition("/")[2])
def test_what_the_page_says_of_loading_is_so(entry: ModelEntry, tmp_path: Path) -> None:
    *_, loads = _rows()[entry.name]
    if entry.source in ENCODERS:
        assert encoder_outcome(ENCODERS[entry.source], tmp_path) == loads
        return
    assert _outcome(_made(tmp_path, CONFIGS[entry.source]())) == loads
