"""Rounds the weights of a checkpoint to integers, in the format of compressed-tensors, which vLLM loads.

    8 bits    int8, a scale per output channel; activations are rounded too, per token, while the model runs
    4 bits    eight in an int32, a scale per 32 inputs of an output channel; activations stay as they are

Linear layers of attention and of the MLPs are rounded, the embedding and the head are not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_GROUP = 32


def quantise(source: Path, target: Path, num_bits: int) -> Path:
    """Write a copy of the checkpoint in `source` whose weights have 8 or 4 bits; return `target`."""
    shutil.copytree(source, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + end: part for end, part in _parts(tensor, num_bits).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _description(num_bits)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _parts(weight: torch.Tensor, num_bits: int) -> dict[str, torch.Tensor]:
    """Return the tensors that stand for a weight, [out, in], by the ends of their names."""
    if num_bits == 8:
        values, scale = _rounded(weight, 127)
        return {"weight": values, "weight_scale": scale}
    num_out, num_in = weight.shape
    values, scale = _rounded(weight.view(num_out, num_in // _GROUP, _GROUP), 7)  # [out, groups, 32], [out, groups, 1]
    nibbles = (values.view(num_out, num_in // 8, 8).to(torch.int64) + 8) << (4 * torch.arange(8))
    return {
        "weight_packed": nibbles.sum(-1).to(torch.int32),  # the first input in the lowest bits
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor(weight.shape),
    }


def _rounded(weight: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values of at most `most`, and a scale for each last axis."""
    scale = weight.abs().amax(-1, keepdim=True) / most
    return (weight / scale).round().to(torch.int8), scale


def _description(num_bits: int) -> dict[str, Any]:
    """Return what `config.json` says of it."""
    weights: dict[str, Any] = {"num_bits": num_bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if num_bits == 8 else {"strategy": "group", "group_size": _GROUP}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if num_bits == 8 else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if num_bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
