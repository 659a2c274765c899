"""Checkpoints are read correctly in every stored form, or refused with a remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.config import NotLean
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.registry import FAMILIES, find_family
from tandem_engine.models.lean.tensor_file import ALIGNMENT, BadTensorFile, TensorFile
from tandem_engine.ops.base import Ops
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.models.lean.kinds import NUM_POSITIONS
from tests.tandem_engine.models.lean.runner import Runner

MakeKind = Callable[..., Path]
LoadFolder = Callable[..., Decoder]


@pytest.fixture
def spoiled(make_kind: MakeKind, tmp_path: Path) -> Path:
    """A copy of a small Llama that tests damage."""
    return Path(shutil.copytree(make_kind("llama2"), tmp_path / "copy"))


def _logits(decoder: Decoder) -> torch.Tensor:
    runner = Runner(decoder)
    runner.add(range(2, 40))
    return runner.step([(0, 0, 38)])


def _change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama3", "phi3", "mixtral"])
def test_a_checkpoint_in_many_files_is_the_one_in_one_file(
    kind: str, ops: Ops, make_kind: MakeKind, load_folder: LoadFolder
) -> None:
    whole, sharded = make_kind(kind), make_kind(kind, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(_logits(load_folder(sharded, ops)), _logits(load_folder(whole, ops)))


def test_files_that_the_index_does_not_name_are_not_read(
    make_kind: MakeKind, load_folder: LoadFolder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_kind("mistral", max_shard_size="40KB"), tmp_path / "copy"))
    expected = _logits(load_folder(folder, TorchOps()))
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    assert torch.equal(_logits(load_folder(folder, TorchOps())), expected)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelUnusable, match=rf"lacks 1 files, {shard.name} first; download"):
        load_folder(folder, TorchOps())


def test_an_index_that_cannot_be_read_is_refused(spoiled: Path, load_folder: LoadFolder) -> None:
    (spoiled / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelUnusable, match="no index of weights"):
        load_folder(spoiled, TorchOps())


def test_a_bias_of_another_length_is_refused(make_kind: MakeKind, load_folder: LoadFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_kind("qwen2"), tmp_path / "copy"))
    _change_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(9)}))
    with pytest.raises(ModelUnusable, match=r"q_proj\.bias.* have 73 numbers for 128 outputs"):
        load_folder(folder, TorchOps())


def test_dtypes_that_cannot_be_fused_are_left_to_the_other_route(spoiled: Path, load_folder: LoadFolder) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    _change_weights(spoiled, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(NotLean, match=r"k_proj.*in different dtypes \(BF16, F32\)"):
        load_folder(spoiled, TorchOps())


def test_float16_is_kept_as_float32(make_kind: MakeKind, load_folder: LoadFolder) -> None:
    ops = TorchOps()
    decoder = load_folder(make_kind("llama2", torch.float16), ops)
    (head,) = decoder.weights.linears["head"].tensors.values()
    assert head.dtype == torch.float32 and torch.equal(head, head.half().float())


def test_bfloat16_can_be_asked_for(ops: Ops, make_kind: MakeKind, load_folder: LoadFolder) -> None:
    narrow = load_folder(make_kind("llama2"), ops, dtype="bfloat16")
    stored = load_folder(make_kind("llama2", torch.bfloat16), ops)
    embeddings = narrow.weights.tensors["embeddings"]
    assert embeddings.dtype == torch.bfloat16 and torch.equal(embeddings, stored.weights.tensors["embeddings"])
    assert torch.equal(ops.unpack(narrow.weights.linears["head"]), ops.unpack(stored.weights.linears["head"]))


def test_float16_weights_are_refused_with_the_remedy(make_kind: MakeKind, load_folder: LoadFolder) -> None:
    with pytest.raises(ModelUnusable, match=r"--dtype float16.*take auto"):
        load_folder(make_kind("llama2"), TorchOps(), dtype="float16")


def test_a_tied_head_is_in_memory_once(ops: Ops, make_kind: MakeKind, load_folder: LoadFolder) -> None:
    weights = load_folder(make_kind("llama3"), ops).weights
    assert "embeddings" not in weights.tensors and "head" in weights.linears


def test_every_tensor_is_aligned_for_vectors(ops: Ops, make_kind: MakeKind, load_folder: LoadFolder) -> None:
    weights = load_folder(make_kind("qwen3-moe"), ops).weights
    packed = [tensor for weight in weights.linears.values() for tensor in weight.tensors.values()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in packed)


def test_a_missing_weight_is_named(spoiled: Path, load_folder: LoadFolder) -> None:
    _change_weights(spoiled, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ModelUnusable, match=r"lacks 1 weights, model\.layers\.1\.self_attn\.k_proj\.weight .*download"):
        load_folder(spoiled, TorchOps())


def test_a_weight_that_the_decoder_does_not_know_is_no_business_of_it(spoiled: Path, load_folder: LoadFolder) -> None:
    _change_weights(spoiled, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    with pytest.raises(NotLean, match=r"model\.layers\.0\.self_attn\.sinks"):
        load_folder(spoiled, TorchOps())


def test_what_old_checkpoints_carry_beside_weights_is_not_read(spoiled: Path, load_folder: LoadFolder) -> None:
    before = _logits(load_folder(spoiled, TorchOps()))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change_weights(spoiled, lambda tensors: tensors.update({name: torch.full((12,), torch.nan)}))
    assert torch.equal(_logits(load_folder(spoiled, TorchOps())), before)


def test_a_torn_file_is_refused_with_the_remedy(spoiled: Path, load_folder: LoadFolder) -> None:
    file = spoiled / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelUnusable, match=r"bytes, but its header means .*download the checkpoint anew"):
        load_folder(spoiled, TorchOps())


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "does not begin with the size"),
        (b"\xff" * 50, "does not begin with the size"),
        (b"\x08" + b"\0" * 7 + b"no json!", "not JSON"),
        (b"\x02" + b"\0" * 7 + b"[]", "no JSON object"),
        (b"\x08" + b"\0" * 7 + b'{"a":[]}', "is not a tensor's"),
        (b"\x38" + b"\0" * 7 + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-9,-8]}}'.ljust(56), "not in the file"),
    ],
)
def test_what_is_no_safetensors_file_says_where(content: bytes, what: str, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadTensorFile, match=what):
        TensorFile(file)


def test_a_tensor_of_an_unknown_dtype_is_refused(spoiled: Path, load_folder: LoadFolder) -> None:
    _change_weights(spoiled, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelUnusable, match="I8"):
        load_folder(spoiled, TorchOps())


@pytest.mark.parametrize("change", [{"vocab_size": 321}, {"num_key_value_heads": 4}, {"hidden_size": 128}])
def test_weights_of_another_size_than_the_configuration_says_are_refused(
    change: dict[str, int], spoiled: Path, load_folder: LoadFolder
) -> None:
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelUnusable, match=r"config\.json and weights are of different models"):
        load_folder(spoiled, TorchOps())


def test_an_activation_that_no_backend_has_is_left_to_the_other_route(spoiled: Path, load_folder: LoadFolder) -> None:
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(NotLean, match="llama with the activation relu"):
        load_folder(spoiled, TorchOps())


def test_a_family_that_is_not_ours_is_left_to_the_other_route() -> None:
    config: Any = AutoConfig.for_model("gpt_neox")
    assert find_family(config) is None
    assert find_family(LlamaConfig()) is FAMILIES["llama"]


def test_tables_reach_as_far_as_asked(make_kind: MakeKind, load_folder: LoadFolder) -> None:
    decoder = load_folder(make_kind("llama2"), TorchOps(), num_positions=NUM_POSITIONS // 2)
    with pytest.raises(IndexError):
        runner = Runner(decoder)
        runner.add([2] * NUM_POSITIONS)
        runner.step([(0, 0, NUM_POSITIONS)])
