"""Computes the logits of one step: the order of the ops, for every family.

All runs of a step lie one after the other in one flat token dimension, prefill chunks and decodes alike. The op layer
does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from tandem_engine.execution.model import ignore
from tandem_engine.models.lean.config import DecoderConfig, LayerConfig
from tandem_engine.models.lean.experts import Experts
from tandem_engine.models.lean.weights import LeanWeights
from tandem_engine.ops.base import KVPool, LayerParts, Ops, QKNorm, Rotary, Step
from tandem_engine.ops.rowwise import softcap_


class Decoder:
    """A decoder-only model on an op layer. A token's bits do not depend on what else is in its step."""

    is_batch_invariant = True

    def __init__(self, config: DecoderConfig, weights: LeanWeights, rotary: dict[str, Rotary], ops: Ops) -> None:
        self.config = config
        self.ops = ops
        self.weights = weights
        self._layers = [
            _Layer(config, index, weights.layer(index), None if layer.rope is None else rotary[layer.rope], ops)
            for index, layer in enumerate(config.layers)
        ]
        self._at_once = ops.layers([layer.parts for layer in self._layers])

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """Write the KV of a step's tokens and return the logits of `sample_rows`: [num_sampled, vocab_size], float32.

        `token_ids` [num_tokens] and `sample_rows` [num_sampled] are int64 on the model's device. The KV of all earlier
        tokens is in its blocks. Called under `torch.inference_mode`.
        """
        x = self.hidden(token_ids, step, pool, sample_rows, kv_written)
        if len(x) == 0:
            return x.new_empty(0, self.config.vocab_size)
        logits = self.ops.linear(x, self.weights.linears["head"])
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        return logits if self.config.logit_softcap is None else softcap_(logits, self.config.logit_softcap)

    def hidden(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """Do the same up to the head: return the final norm of `rows`, [num_rows, hidden_size], float32."""
        run = self._op_by_op if self._at_once is None else self._at_once.forward
        x, more = run(self._embed(token_ids), step, pool, rows, kv_written)
        if len(x) == 0:
            return x
        return self.ops.add_rms_norm(x, more, self.weights.tensors["final_norm"], self.config.norm_eps)

    def _op_by_op(
        self, x: torch.Tensor, step: Step, pool: KVPool, rows: torch.Tensor, kv_written: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what `tandem_engine.ops.base.Layers` computes; this is its reference."""
        more = None
        for layer in self._layers[:-1]:
            more = layer.forward(x, more, step, pool)
        return self._layers[-1].finish(x, more, step, pool, rows, kv_written)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.config.tied:
            x = self.ops.rows(self.weights.linears["head"], token_ids)
        else:
            x = functional.embedding(token_ids, self.weights.tensors["embeddings"]).float()
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale


class _Layer:
    def __init__(
        self, config: DecoderConfig, index: int, weights: LeanWeights, rotary: Rotary | None, ops: Ops
    ) -> None:
        layer = config.layers[index]
        self._index = index
        self._ops = ops
        self.parts = _parts_of(config, layer, weights, rotary)
        mixture = layer.experts
        self._experts = None if mixture is None else Experts(mixture, config.activation, weights.linears, ops)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None, step: Step, pool: KVPool) -> torch.Tensor:
        """Return what the next layer adds to the residual stream `x` [num_tokens, hidden_size].

        `more` is the result of the layer before. This layer adds `more` and its own attention to `x` in place.
        """
        attended = self._attend(self._added(x, more, self.parts.input_norm), step, pool, ignore)
        return self._behind_attention(x, attended)

    def finish(
        self,
        x: torch.Tensor,
        more: torch.Tensor | None,
        step: Step,
        pool: KVPool,
        rows: torch.Tensor,
        kv_written: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream of `rows` alone and what is to be added to it; else like `forward`."""
        attended = self._attend(self._added(x, more, self.parts.input_norm), step, pool, kv_written)
        x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return x, self._behind_attention(x, attended) if len(rows) else x

    def _behind_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        more = self._normed(self._ops.linear(attended, parts.output), parts.attention_output_norm)
        return self._normed(self._mlp(self._added(x, more, parts.mlp_norm)), parts.mlp_output_norm)

    def _attend(self, x: torch.Tensor, step: Step, pool: KVPool, kv_written: Callable[[], None]) -> torch.Tensor:
        parts = self.parts
        step, index = pool.place(step, self._index)
        qkv = self._ops.linear(x, parts.qkv)
        if parts.projection_norm is not None:
            self._norm_projections(qkv, parts.projection_norm, pool)
        query = self._ops.rope_and_kv_write(qkv, parts.num_heads, step, pool, index, parts.rotary, parts.head_norm)
        kv_written()
        return self._ops.paged_attention(
            query,
            parts.num_heads,
            step,
            pool,
            index,
            scale=parts.scale,
            window=parts.window,
            softcap=parts.softcap,
        )

    def _norm_projections(self, qkv: torch.Tensor, norm: QKNorm, pool: KVPool) -> None:
        """Norm all queries of a row as one vector, and all keys of a row as one vector, in place."""
        sizes = [self.parts.num_heads * pool.head_dim, *[pool.num_kv_heads * pool.head_dim] * 2]
        query, key, _ = torch.split(qkv, sizes, 1)
        query.copy_(self._ops.rms_norm(query, norm.query, norm.eps))
        key.copy_(self._ops.rms_norm(key, norm.key, norm.eps))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self._experts is not None:
            return self._experts.forward(x)
        gate_up, down = self.parts.gate_up, self.parts.down
        assert gate_up is not None and down is not None, "a layer without experts has an MLP"
        return self._ops.linear(self._ops.gated(self._ops.linear(x, gate_up), self.parts.activation), down)

    def _added(self, x: torch.Tensor, more: torch.Tensor | None, norm: torch.Tensor | None) -> torch.Tensor:
        """Add `more` to `x` in place and return the norm of the sum."""
        if more is None:
            return self._normed(x, norm)
        return x.add_(more) if norm is None else self._ops.add_rms_norm(x, more, norm, self.parts.eps)

    def _normed(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of `x`; `x` itself if the family has no such norm."""
        return x if norm is None else self._ops.rms_norm(x, norm, self.parts.eps)


def _parts_of(config: DecoderConfig, layer: LayerConfig, weights: LeanWeights, rotary: Rotary | None) -> LayerParts:
    linears, norms = weights.linears, weights.tensors
    return LayerParts(
        input_norm=norms.get("input_norm"),
        qkv=linears["qkv"],
        projection_norm=_qk_norm(norms, "query_projection_norm", "key_projection_norm", config.norm_eps),
        head_norm=_qk_norm(norms, "query_norm", "key_norm", config.norm_eps),
        rotary=rotary,
        num_heads=config.num_heads,
        scale=config.attention_scale,
        window=layer.window,
        softcap=config.attention_softcap,
        output=linears["output"],
        attention_output_norm=norms.get("attention_output_norm"),
        mlp_norm=norms.get("mlp_norm"),
        gate_up=linears.get("gate_up"),
        activation=config.activation,
        down=linears.get("down"),
        mlp_output_norm=norms.get("mlp_output_norm"),
        eps=config.norm_eps,
    )


def _qk_norm(norms: Mapping[str, torch.Tensor], query: str, key: str, eps: float) -> QKNorm | None:
    return QKNorm(norms[query], norms[key], eps) if query in norms else None
