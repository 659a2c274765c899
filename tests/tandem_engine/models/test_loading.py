"""Checkpoints that cannot be served are refused by name; the reported facts of the others are right."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
)

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.pool_size import choose_num_blocks
from tandem_engine.models.checkpoint import find_checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.models.loader import load_model
from tandem_engine.models.placement import choose_device
from tandem_engine.models.support import check_config, check_model_class, context_length
from tandem_engine.settings import EngineConfig
from tandem_machine.memory import Memory, usable_memory
from tests.tandem_machine.node_tree import put_on_nodes

MakeCheckpoint = Callable[[str], Path]
CPU = torch.device("cpu")


def _llama_with(**values: Any) -> Any:
    return LlamaConfig(**values)


def _quiet(stage: str, fraction: float) -> None:
    """Ignore the progress."""


@pytest.fixture
def folder(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of a small Llama that tests damage."""
    return Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "copy"))


def _load(folder: Path, **values: Any) -> Any:
    return load_model(EngineConfig(str(folder), device="cpu", num_threads=1, **values), _quiet)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (T5Config(), "t5 is an encoder-decoder model"),
        (DeepseekV3Config(), "deepseek_v3 has multi-head latent attention (kv_lora_rank)"),
        (Qwen3NextConfig(), "qwen3_next has layers other than full and sliding attention (linear_attention)"),
        (Llama4TextConfig(), "llama4_text has chunked attention (attention_chunk_size)"),
        (_llama_with(num_kv_shared_layers=2), "llama shares KV between layers (num_kv_shared_layers)"),
        (_llama_with(quantization_config={"quant_method": "gptq"}), "llama is quantised (quantization_config)"),
        (_llama_with(vision_config={"a": 1}), "llama takes images (vision_config)"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_is_not_built_is_refused_by_name(config: Any, what: str) -> None:
    with pytest.raises(ModelUnusable) as refusal:
        check_config(config)
    assert what in str(refusal.value) and "serve a decoder-only model" in str(refusal.value)


def test_a_state_space_model_is_refused_for_its_attention() -> None:
    from transformers import MambaForCausalLM

    with pytest.raises(ModelUnusable, match=r"mamba .* does not support attention backends"):
        check_model_class(MambaForCausalLM, MambaConfig())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            GptOssConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                vocab_size=320, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
            ),
            "attention sinks",
        ),
    ],
    ids=["gpt_oss"],
)  # fmt: skip
def test_attention_that_is_not_built_is_refused_when_it_is_tried(config: Any, what: str, folder: Path) -> None:
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    with pytest.raises(ModelUnusable, match=what):
        _load(folder)


def test_a_model_that_sees_later_tokens_is_refused(folder: Path) -> None:
    BertLMHeadModel(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=320)
    ).save_pretrained(folder)
    with pytest.raises(ModelUnusable, match="attends to later tokens too"):
        _load(folder)


def test_pickled_weights_are_refused_with_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnusable, match="safe_serialization"):
        _load(folder)


def test_a_checkpoint_without_tokenizer_json_is_refused_with_the_remedy(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnusable, match=r"no tokenizer\.json; make one with"):
        _load(folder)


def test_an_architecture_with_its_own_code_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    with pytest.raises(ModelUnusable, match="never run"):
        _load(folder)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelUnusable, match="/nowhere/at/all is not a folder"):
        find_checkpoint("/nowhere/at/all", "", _quiet)


def test_a_hub_model_that_cannot_be_had_offline_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnusable, match="HF_HUB_OFFLINE"):
        find_checkpoint("tandem-tests/not-a-model", "", _quiet)
    with pytest.raises(ModelUnusable, match="tandem-tests/not-a-model at v2 is neither"):
        find_checkpoint("tandem-tests/not-a-model", "", _quiet, "v2")


@pytest.mark.parametrize("name", ["", "@tandem/demo"])
def test_a_revision_of_what_has_none_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ModelUnusable, match="has no revisions, and 'v2' was requested"):
        find_checkpoint(name or str(folder), "", _quiet, "v2")


def test_a_longer_context_than_the_models_is_refused() -> None:
    assert context_length(LlamaConfig(max_position_embeddings=512), None) == 512
    assert context_length(LlamaConfig(max_position_embeddings=512), 100) == 100
    with pytest.raises(ModelUnusable, match="--max-model-len 513 is more than the model's 512 positions"):
        context_length(LlamaConfig(max_position_embeddings=512), 513)


def test_embeddings_that_depend_on_the_longest_neighbour_are_served_up_to_where_they_do_not() -> None:
    factors = [1.0] * 16
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 4096,
        },
        pad_token_id=0,
    )
    with pytest.raises(ModelUnusable, match="--max-model-len 4096"):
        context_length(config, None)
    assert context_length(config, 4096) == 4096


def test_the_facts_of_a_checkpoint_are_those_of_its_files(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 3], "temperature": 0.6, "top_k": 20, "max_new_tokens": 99})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    loaded = _load(folder, served_model_name="mine", max_model_len=256, state_dir=str(tmp_path / "state"))
    info = loaded.info
    assert (info.model_id, info.architecture, info.vocab_size) == ("mine", "LlamaForCausalLM", 320)
    assert (info.context_length, info.eos_token_ids, info.chat_template) == (256, [1, 3], "{{ messages }}")
    assert info.generation_defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    where, arithmetic = f"torch-{torch.__version__.split('+')[0]}/cpu", f"{info.dtype}/llama/tp1/lean"
    assert info.numerics_class == f"{where}/{loaded.ops.name}/{arithmetic}"
    assert info.num_parameters == AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert set(info.asset_paths) == {"tokenizer.json", "tokenizer_config.json"}
    assert loaded.geometry == KVGeometry(3, 2, 16, 16, torch.float32)
    assert len(info.weights_digest) == len(info.tokenizer_digest) == 32


def test_a_tag_makes_another_numerics_class_and_changes_nothing_else(folder: Path) -> None:
    plain, tagged = _load(folder).info, _load(folder, numerics_tag="fma-2").info
    assert tagged.numerics_class == f"{plain.numerics_class}/fma-2"
    assert msgspec.structs.replace(tagged, numerics_class=plain.numerics_class) == plain
    with pytest.raises(ValueError, match="numerics_tag is 'a b'"):
        EngineConfig(str(folder), numerics_tag="a b")


def test_a_named_default_template_is_taken_from_the_tokenizers_config(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    assert _load(folder).info.chat_template == "yes"


def test_digests_are_of_contents_and_computed_once_per_file(tmp_path: Path) -> None:
    file, copy, state = tmp_path / "a" / "w.safetensors", tmp_path / "b" / "w.safetensors", tmp_path / "state"
    for path in (file, copy):
        path.parent.mkdir()
        path.write_bytes(b"weights")
    digests = DigestCache(state)
    first = digests.digest([file])
    # 1. The same contents elsewhere have the same digest.
    assert digests.digest([copy]) == first
    # 2. A file with the same size, times and inode is not read again: changed contents go unnoticed.
    status = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"WEIGHTS")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert DigestCache(state).digest([file]) == first
    # 3. A file with another modification time is read again.
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = DigestCache(state).digest([file])
    assert second != first == DigestCache(state).digest([copy])
    # 4. A broken or missing cache costs only time.
    (state / "digests.json").write_text("{ cut off")
    assert DigestCache(state).digest([file]) == DigestCache(None).digest([file]) == second
    assert not [path for path in state.iterdir() if path.name != "digests.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_digests_that_cannot_be_kept_are_a_sentence_and_leave_no_files(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    file, state, sentences = tmp_path / "w.safetensors", tmp_path / "state", list[str]()
    file.write_bytes(b"weights")
    monkeypatch.setattr("tandem_engine.models.digest.json.dump", refuse)
    assert DigestCache(state, sentences.append).digest([file]) == DigestCache(None).digest([file])
    assert list(state.iterdir()) == []
    (sentence,) = sentences
    assert os.strerror(number) in sentence and "computed again at the next start" in sentence


def test_a_state_directory_that_cannot_be_made_costs_only_time(tmp_path: Path) -> None:
    file, sentences = tmp_path / "w.safetensors", list[str]()
    file.write_bytes(b"weights")
    assert DigestCache(file / "state", sentences.append).digest([file]) == DigestCache(None).digest([file])
    assert len(sentences) == 1


def test_without_a_folder_a_file_is_read_once_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def hash_file(path: Path) -> str:
        read.append(path)
        return "abc"

    monkeypatch.setattr("tandem_engine.models.digest._hash_file", hash_file)
    file, other = tmp_path / "w.safetensors", tmp_path / "config.json"
    file.write_bytes(b"weights")
    other.write_bytes(b"{}")
    digests = DigestCache(None)
    assert digests.digest([file]) == digests.digest([file]) != digests.digest([file, other])
    assert read == [file.resolve(), other.resolve()]


def test_weights_that_lie_twice_in_a_folder_count_once(folder: Path) -> None:
    info = _load(folder).info
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    again = _load(folder).info
    assert (again.num_parameters, again.weights_digest) == (info.num_parameters, info.weights_digest)


def test_the_pool_is_sized_as_told_or_by_free_memory() -> None:
    geometry = KVGeometry(2, 2, 16, 16, torch.float32)
    base = EngineConfig("m", max_num_seqs=4)
    size = geometry.bytes_per_block
    assert choose_num_blocks(EngineConfig("m", num_kv_blocks=7), geometry, 512, CPU) == 7
    assert choose_num_blocks(EngineConfig("m", kv_memory_bytes=10 * size + 1), geometry, 512, CPU) == 10
    assert choose_num_blocks(base, geometry, 512, CPU) == 4 * 512 // 16, "no more than four full contexts"
    huge = choose_num_blocks(base, geometry, 10**9, CPU)
    assert huge * size <= 0.21 * usable_memory().available_bytes
    with pytest.raises(ModelUnusable, match="--kv-memory-bytes"):
        choose_num_blocks(EngineConfig("m", kv_memory_bytes=size - 1), geometry, 512, CPU)


def test_the_pool_of_a_small_model_is_small_however_large_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, base = KVGeometry(6, 4, 32, 16, torch.float32), EngineConfig("m")
    size, terabyte = geometry.bytes_per_block, Memory(1 << 40, 1 << 40)
    monkeypatch.setattr("tandem_engine.execution.pool_size.usable_memory", lambda: terabyte)

    def pool_bytes(config: EngineConfig, weight_bytes: int, context_length: int = 2048) -> int:
        return size * choose_num_blocks(config, geometry, context_length, CPU, weight_bytes=weight_bytes)

    # 1. Three times the weights, or 32 MiB; more only for one longest request.
    assert pool_bytes(base, 12_000_000) == 36_000_000 // size * size
    assert pool_bytes(base, 1_000) == (32 << 20) // size * size
    assert pool_bytes(base, 1_000, context_length=8192) == 8192 // 16 * size
    # 2. A large model takes a fifth of the machine, beyond 2 GiB.
    assert pool_bytes(base, 100 << 30, context_length=1 << 20) == (1 << 40) // 5 // size * size
    # 3. What is configured wins, and a limit is one.
    assert pool_bytes(EngineConfig("m", kv_memory_bytes=10 * size), 11_000_000) == 10 * size
    assert pool_bytes(EngineConfig("m", kv_memory_limit_bytes=20 * size), 11_000_000) == 20 * size


def test_a_node_has_a_copy_of_the_weights_unless_they_take_more_than_half_of_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has a GiB; node 2 is not there, so it has no memory."""
    (tmp_path / "nodes").mkdir()
    put_on_nodes(tmp_path / "nodes", monkeypatch, {0: ("0-3", 1), 1: ("4-7", 1)})
    config = EngineConfig(str(folder), device="cpu", num_threads=1, kernels="torch", state_dir=str(tmp_path / "state"))
    packed = tmp_path / "state" / "packed"
    for number, files in ((0, {"node0": 1, ".": 0}), (2, {"node0": 1, ".": 1}), (None, {"node0": 1, ".": 1})):
        load_model(config, _quiet, numa_node=number)
        assert {place: len(list((packed / place).glob("*.safetensors"))) for place in files} == files


def test_a_cuda_device_is_named_by_its_number() -> None:
    assert EngineConfig("m", device="cuda:3").device == "cuda:3"
    with pytest.raises(ValueError, match="device is 'gpu', must be auto, cpu, cuda or cuda:N"):
        EngineConfig("m", device="gpu")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EngineConfig("m", device="cuda:1")), type=EngineConfig)


def test_a_cuda_device_that_the_machine_lacks_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelUnusable, match=r"--device cuda:1, but torch .* is built without CUDA; install a CUDA"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0"), "a device has its number"
    assert choose_device("cpu") == torch.device("cpu")
    assert taken == [torch.device("cuda:1"), torch.device("cuda:0"), torch.device("cuda:0")]
    with pytest.raises(ModelUnusable, match="--device cuda:2, but torch finds 2 CUDA devices; the first is cuda:0"):
        choose_device("cuda:2")


def test_auto_says_why_it_leaves_a_card_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("tandem_engine.models.placement._DRIVER_GPUS", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def is_available() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (found 12080).", stacklevel=1)
        return False

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12080).")

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device("auto") == CPU and not caplog.records, "without cards there is nothing to say"
    (tmp_path / "0000:18:00.0").mkdir()
    assert choose_device("auto") == CPU
    (record,) = caplog.records
    assert "has NVIDIA cards" in record.message and "too old (found version 12080)" in record.message
    with pytest.raises(ModelUnusable, match=r"--device cuda, but torch .* too old .*; or take --device cpu"):
        choose_device("cuda")


def test_the_mapped_bytes_are_those_that_are_read_from_the_packed_file(folder: Path, tmp_path: Path) -> None:
    """Weights of float16 are kept in float32: the checkpoint's size is half of what is mapped."""
    halves = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    loaded = _load(folder, state_dir=str(tmp_path / "state"))
    (packed,) = (tmp_path / "state" / "packed").glob("*.safetensors")
    num_checkpoint_bytes = sum(tensor.nbytes for tensor in halves.values())
    assert 2 * num_checkpoint_bytes <= loaded.mapped_bytes <= packed.stat().st_size
    assert _load(folder).mapped_bytes == 0, "without a state directory they are private"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "packed").write_text("no folder")
    assert _load(folder, state_dir=str(tmp_path / "other")).mapped_bytes == 0, "they could not be kept"
