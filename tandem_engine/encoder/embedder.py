"""Makes embeddings with a decoder, such as Qwen3-Embedding: causal attention, the vector of the last token.

An input is computed whole in one step, so a layer's keys and values are used only while that layer runs. All layers
share one layer's memory: 8 KB per token for Qwen3-Embedding-0.6B, not 229 KB.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tandem_engine.encoder.batch import EncoderInput, Values
from tandem_engine.encoder.heads import EmbeddingHead
from tandem_engine.encoder.messages import EncoderInfo
from tandem_engine.encoder.text_encoder import starts_of
from tandem_engine.execution.input_batch import BatchBuilder, Stretch
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.sources import LinearSource, Plan, Source, linear
from tandem_engine.ops.base import KVPool, Step

_BLOCK_SIZE = 16
_MODEL = "model."


class DecoderEmbedder:
    """`tandem_engine.encoder.batch.Encoder` of a decoder."""

    def __init__(self, decoder: Decoder, head: EmbeddingHead, context_length: int, device: torch.device) -> None:
        self.context_length = context_length
        self._decoder = decoder
        self._head = head
        self._device = device
        self._pool = self._pool_of(1)
        self._batches = BatchBuilder(_BLOCK_SIZE, device)

    @property
    def info(self) -> EncoderInfo:
        return self._head.info

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    @torch.inference_mode()
    def encode(self, inputs: Sequence[EncoderInput]) -> Values:
        starts = starts_of(inputs)
        step = self._step(inputs)
        hidden = self._decoder.hidden(step.token_ids, step, self._pool, step.sample_rows)
        values: Values = self._head.forward(hidden, starts, [each.pooling for each in inputs]).cpu().numpy()
        return values

    def _step(self, inputs: Sequence[EncoderInput]) -> Step:
        """Return the places of all tokens, in blocks of each input's own; the pool has room for all of them."""
        tables, num_blocks = [], 0
        for each in inputs:
            end = num_blocks - (-each.num_tokens // _BLOCK_SIZE)
            tables.append([*range(num_blocks, end)])
            num_blocks = end
        if num_blocks > len(self._pool.rows):
            self._pool = self._pool_of(num_blocks)
        stretches = [
            Stretch(0, each.token_ids.tolist(), [table], each.num_tokens)
            for each, table in zip(inputs, tables, strict=True)
        ]
        step = self._decoder.ops.step(self._batches.build(stretches))
        return replace(step, groups=(step,))

    def _pool_of(self, num_blocks: int) -> KVPool:
        """Return the keys and values of one layer, which is every layer's place."""
        config = self._decoder.config
        elements = 2 * config.num_kv_heads * config.head_dim * _BLOCK_SIZE
        return KVPool(
            rows=torch.zeros(num_blocks, elements, device=self._device),
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=_BLOCK_SIZE,
            places=[(0, 0)] * config.num_layers,
        )


def bare_family(family: Family, stored: Collection[str]) -> Family:
    """Return the family with a head that shares the embeddings, which embedding needs none of.

    `stored` are the checkpoint's names: embedding models are saved with the names of the whole model or of its inner
    part, without "model.".
    """
    values = {each.name: getattr(family, each.name) for each in fields(family)}
    values["decoder"] = lambda config: replace(family.decoder(config), tied=True)
    return _BareFamily(**values, is_inner=not any(name.startswith(_MODEL) for name in stored))


@dataclass(frozen=True)
class _BareFamily(Family):
    is_inner: bool = False

    def plan(self, config: Any) -> Plan:
        plan = {name: self._named(source) for name, source in super().plan(config).items() if name != "head"}
        embeddings = "embed_tokens" if self.is_inner else f"{_MODEL}embed_tokens"
        plan.pop("embeddings", None)
        return plan | {"head": linear(embeddings)}

    def _named(self, source: Source) -> Source:
        if not self.is_inner:
            return source
        if isinstance(source, LinearSource):
            return LinearSource(*(tuple(map(_inner, names)) for names in (source.weights, source.biases)))
        return replace(source, name=_inner(source.name))


def _inner(name: str) -> str:
    return name.removeprefix(_MODEL)
