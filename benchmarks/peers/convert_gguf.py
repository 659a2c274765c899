"""Converts a Llama checkpoint to GGUF for llama.cpp. Runs in llama.cpp's venv.

python -m benchmarks.peers.convert_gguf FOLDER FILE {f32,bf16}

llama.cpp's own script needs torch, and knows tokenizers by name only; ours are made up.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BF16_SHIFT = 16
_NORMAL, _CONTROL = 1, 3
_NUM_CONTROL_TOKENS = 2
_OF_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor of a Hugging Face Llama; raises KeyError for one that has no name there."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{int(layer)}.{_OF_LAYER[rest.removesuffix('.weight')]}.weight"


def turned(weight: Any, num_heads: int) -> Any:
    """Return rows of a query or key projection so that pairs that turn together lie side by side.

    [num_heads * head_dim, in_features], as Hugging Face has them half a head apart.
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, 2, half, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(folder: Path, file: Path, kind: str) -> None:
    """Write `file`, matrices as `kind` says ("f32" or "bf16"), vectors in float32."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    _write_shape(writer, config)
    _write_words(writer, folder)
    for name, weight in _float32_tensors(folder):
        for end, heads in (("q_proj.weight", "num_attention_heads"), ("k_proj.weight", "num_key_value_heads")):
            if name.endswith(end):
                weight = turned(weight, config[heads])
        if kind == "bf16" and weight.ndim > 1:
            numbers = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(gguf_name(name), numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _rope_theta(config: dict[str, Any]) -> float:
    """Newer configurations keep it one level down."""
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _write_words(writer: Any, folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word.replace("Ġ", "\u2581") for word, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([_CONTROL if index < _NUM_CONTROL_TOKENS else _NORMAL for index in range(len(words))])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _float32_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    safetensors: Any = importlib.import_module("safetensors.numpy")
    for file in sorted(folder.glob("*.safetensors")):
        for name, weight in sorted(safetensors.load_file(file).items()):
            assert weight.dtype == "float32", f"{name} is {weight.dtype}: the widened checkpoint is converted"
            yield name, weight


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
