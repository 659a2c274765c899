"""A model that cannot be served is refused with its name, the reason and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem_engine.errors import ModelUnusable
from tests.tandem_engine.encoder import checkpoints
from tests.tandem_engine.encoder.loaded import loaded


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _refusal(folder: Path, **values: Any) -> str:
    with pytest.raises(ModelUnusable) as refused:
        loaded(folder, **values)
    return str(refused.value)


@pytest.mark.parametrize("model_type", ["modernbert", "nomic_bert", "new", "deberta-v2", "mpnet", "t5"])
def test_types_that_are_not_built_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    _change(tmp_path / "config.json", model_type=model_type)
    assert f"of type {model_type}, which is not built" in _refusal(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    _change(tmp_path / "config.json", auto_map={"AutoModel": "theirs.JinaBertModel"})
    assert "never run" in _refusal(tmp_path)


def test_a_model_that_generates_is_refused(tmp_path: Path) -> None:
    checkpoints.make("qwen3-causal", tmp_path)
    message = _refusal(tmp_path)
    assert "Qwen3ForCausalLM" in message and "prefill and decode workers" in message


def test_heads_that_are_not_built_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    _change(tmp_path / "config.json", architectures=["BertForTokenClassification"])
    assert "BertForTokenClassification" in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_size": 74}, "74"),
        ({"intermediate_size": 100}, "layers.0.up"),
        ({"vocab_size": 111}, "word_embeddings"),
        ({"num_hidden_layers": 4}, "lacks 16 weights"),
        ({"num_hidden_layers": 2}, "has 16 weights"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    _change(tmp_path / "config.json", **change)
    assert words in _refusal(tmp_path)


@pytest.mark.parametrize("mode", ["max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"])
def test_poolings_that_are_not_built_are_refused_by_name(mode: str, tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    checkpoints.write_sentence_files(tmp_path, f"pooling_mode_{mode}")
    assert f"pooling_mode_{mode}" in _refusal(tmp_path)


def test_several_poolings_at_once_are_refused(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    checkpoints.write_sentence_files(tmp_path, "pooling_mode_cls_token")
    _change(tmp_path / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    assert "pooling_mode_cls_token and pooling_mode_mean_tokens" in _refusal(tmp_path)


def test_modules_that_are_not_built_are_refused_by_name(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    checkpoints.write_sentence_files(tmp_path, "pooling_mode_mean_tokens")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    checkpoints.write(tmp_path / "modules.json", modules)
    assert "Transformer, Pooling, Dense, Normalize" in _refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json"])
@pytest.mark.parametrize("content", ["{", "7"])
def test_damaged_files_are_named(name: str, content: str, tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    checkpoints.write_sentence_files(tmp_path, "pooling_mode_mean_tokens")
    (tmp_path / name).write_text(content)
    message = _refusal(tmp_path)
    assert name in message and "download the checkpoint anew" in message


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = _refusal(tmp_path)
    assert "cannot be read" in message and "download the checkpoint anew" in message


def test_weights_that_give_nan_are_refused(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.layer.1.output.dense.bias"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "not finite" in _refusal(tmp_path)


def test_lengths_and_dtypes_beyond_the_model_are_refused(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    assert f"{checkpoints.NUM_POSITIONS} positions" in _refusal(tmp_path, max_model_len=1000)
    assert "float32" in _refusal(tmp_path, dtype="bfloat16")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    checkpoints.make("bert", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "safetensors" in _refusal(tmp_path)
