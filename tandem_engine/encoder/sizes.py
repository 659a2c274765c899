"""Checks that weights have the configuration's sizes, which the kernels do not check."""

from __future__ import annotations

from pathlib import Path

from tandem_engine.encoder.config import EncoderConfig
from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.weights import LeanWeights


def check_sizes(config: EncoderConfig, num_labels: int, weights: LeanWeights, folder: Path) -> None:
    """Raise ModelUnusable with the first weight of another size; `num_labels` of the head, if there is one."""
    for name, weight in weights.linears.items():
        _check(name, (weight.out_features, weight.in_features), _linear_size(config, num_labels, name), folder)
    for name, tensor in weights.tensors.items():
        _check(name, tuple(tensor.shape), _tensor_size(config, name), folder)


def _linear_size(config: EncoderConfig, num_labels: int, name: str) -> tuple[int, ...]:
    hidden, inner = config.hidden_size, config.inner_size
    return {
        "qkv": (3 * hidden, hidden),
        "output": (hidden, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "head_dense": (hidden, hidden),
        "head_output": (num_labels, hidden),
    }[name.rpartition(".")[2]]


def _tensor_size(config: EncoderConfig, name: str) -> tuple[int, ...]:
    rows = {
        "word_embeddings": config.vocab_size,
        "position_embeddings": config.first_position + config.num_positions,
        "token_type_embeddings": config.num_token_types,
    }
    return (rows[name], config.hidden_size) if name in rows else (config.hidden_size,)


def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...], folder: Path) -> None:
    if shape != expected:
        raise ModelUnusable(
            f"{folder}: {name} has the shape {shape}, but config.json means {expected}; config.json and weights are of "
            "different models"
        )
