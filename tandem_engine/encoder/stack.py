"""Computes the token vectors of one step: the order of the ops, for every family of BERT's kind."""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem_engine.encoder.config import EncoderConfig
from tandem_engine.models.lean.weights import LeanWeights
from tandem_engine.ops.base import EncoderLayerParts, LayerNorm, Ops


class EncoderStack:
    """Embeddings and layers on an op layer. A token's bits depend on its own run alone."""

    def __init__(self, config: EncoderConfig, weights: LeanWeights, ops: Ops) -> None:
        self.config = config
        self._tables = weights.tensors
        self._norm = _norm_of(weights, "embedding_norm", config.norm_eps)
        self._ops = ops
        self._layers = [_parts_of(config, weights.layer(index)) for index in range(config.num_layers)]
        self._at_once = ops.encoder_layers(self._layers)

    def forward(
        self, token_ids: torch.Tensor, token_types: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Return the last layer's vectors, [num_tokens, hidden_size], float32.

        `token_ids`, `token_types` and `positions` (from 0 in each run) are [num_tokens], int64, on the model's device;
        `starts` as in `Ops.self_attention`. Called under `torch.inference_mode`.
        """
        x = self._embed(token_ids, token_types, positions)
        return self._op_by_op(x, starts) if self._at_once is None else self._at_once.forward(x, starts)

    def _embed(self, token_ids: torch.Tensor, token_types: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(token_ids, self._tables["word_embeddings"]).float()
        if self.config.num_token_types:
            x += functional.embedding(token_types, self._tables["token_type_embeddings"])
        rows = positions + self.config.first_position
        x += functional.embedding(rows, self._tables["position_embeddings"])
        return self._ops.layer_norm(x, self._norm)

    def _op_by_op(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Compute what `tandem_engine.ops.base.EncoderLayers` computes; this is its reference."""
        for layer in self._layers:
            x = self._layer(layer, x, starts)
        return x

    def _layer(self, layer: EncoderLayerParts, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        ops = self._ops
        attended = ops.self_attention(ops.linear(x, layer.qkv), layer.num_heads, starts, layer.scale)
        x = ops.layer_norm(x, layer.attention_norm, ops.linear(attended, layer.output))
        inner = ops.activate(ops.linear(x, layer.up), layer.activation)
        return ops.layer_norm(x, layer.mlp_norm, ops.linear(inner, layer.down))


def _parts_of(config: EncoderConfig, weights: LeanWeights) -> EncoderLayerParts:
    return EncoderLayerParts(
        qkv=weights.linears["qkv"],
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5,
        output=weights.linears["output"],
        attention_norm=_norm_of(weights, "attention_norm", config.norm_eps),
        up=weights.linears["up"],
        activation=config.activation,
        down=weights.linears["down"],
        mlp_norm=_norm_of(weights, "mlp_norm", config.norm_eps),
    )


def _norm_of(weights: LeanWeights, name: str, eps: float) -> LayerNorm:
    return LayerNorm(weights.tensors[f"{name}.weight"], weights.tensors[f"{name}.bias"], eps)
