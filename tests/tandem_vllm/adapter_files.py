"""Makes random LoRA adapters in peft's format for the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem_engine.models.checkpoint import find_checkpoint

_RANK = 8


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of the attention's query and value projections, whose effect is large."""
    checkpoint = find_checkpoint("@tandem/demo", "", lambda stage, fraction: None, "")
    values = json.loads((checkpoint.folder / "config.json").read_bytes())
    hidden, num_heads = values["hidden_size"], values["num_attention_heads"]
    head_size = values.get("head_dim") or hidden // num_heads
    sizes = {"q_proj": num_heads * head_size, "v_proj": values["num_key_value_heads"] * head_size}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(values["num_hidden_layers"]):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=random) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, _RANK, generator=random) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
