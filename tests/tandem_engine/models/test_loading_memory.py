"""A loaded model leaves nothing in memory that it does not need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config

from tandem_engine.models.loader import LoadedModel, load_model
from tandem_engine.models.transformers_model import _OwnEmbedding
from tandem_engine.settings import EngineConfig
from tests.checkpoints import _SHAPE, CONFIGS, byte_level_tokenizer

_LOAD_LEAN = """
import sys
from tandem_engine.models.loader import load_model
from tandem_engine.settings import EngineConfig
load_model(EngineConfig(sys.argv[1], device="cpu", num_threads=1, route="lean"), lambda *_: None)
sys.exit("its models are imported" if "transformers.modeling_utils" in sys.modules else 0)
"""


def _saved(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def _load(folder: Path) -> tuple[LoadedModel, Any]:
    loaded = load_model(EngineConfig(str(folder), device="cpu", num_threads=1, route="transformers"), lambda *_: None)
    model: Any = loaded.model
    return loaded, model._model


def test_the_lean_route_imports_no_model_of_transformers(make_checkpoint: Callable[[str], Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_LEAN, str(make_checkpoint("llama"))],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["olmo2", "llama"])
def test_the_compatibility_route_leaves_the_checkpoints_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "model", CONFIGS[kind](), dtype)
    loaded, _ = _load(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert loaded.geometry.num_layers == 3


def test_a_bf16_embedding_stays_bf16_and_a_tied_one_is_the_heads(tmp_path: Path) -> None:
    _, untied = _load(_saved(tmp_path / "untied", LlamaConfig(**_SHAPE), torch.bfloat16))
    embedding = untied.get_input_embeddings()
    assert isinstance(embedding, _OwnEmbedding) and isinstance(embedding.weight, torch.Tensor)
    assert embedding.weight.dtype == torch.bfloat16
    assert embedding(torch.tensor([[3, 5]])).dtype == torch.float32
    _, tied = _load(_saved(tmp_path / "tied", LlamaConfig(**_SHAPE | {"tie_word_embeddings": True}), torch.bfloat16))
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    plain = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    _, wide = _load(_saved(tmp_path / "wide", Olmo2Config(**plain), torch.float32))
    assert wide.get_input_embeddings().weight.dtype == torch.float32
