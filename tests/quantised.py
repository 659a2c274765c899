"""Rounds the weights of a checkpoint to int8, in the format of compressed-tensors, which vLLM loads.

Linear layers of attention and of the MLPs are rounded, with a scale per output channel; the embedding and the head are
not. Their inputs are rounded too, per token, while the model runs. Weights of 4 bits would need a 16-bit dtype: vLLM's
kernel for CPUs has no float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_ROUNDED: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
_DESCRIPTION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_ROUNDED, "strategy": "channel", "dynamic": False},
            "input_activations": {**_ROUNDED, "strategy": "token", "dynamic": True},
        }
    },
}
"""What `config.json` says of it."""


def quantise(source: Path, target: Path) -> Path:
    """Write a copy of the checkpoint in `source` whose weights have 8 bits; return `target`."""
    shutil.copytree(source, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(-1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _DESCRIPTION}, indent=2))
    return target
