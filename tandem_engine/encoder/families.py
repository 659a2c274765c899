"""Maps configurations and checkpoints of BERT, RoBERTa, XLM-RoBERTa and DistilBERT to our encoder.

The encoder's weights have our names. Of layer i, each after "layers.{i}.":

    qkv  output  attention_norm.weight  attention_norm.bias  up  down  mlp_norm.weight  mlp_norm.bias

Outside the layers: word_embeddings, position_embeddings, token_type_embeddings (not DistilBERT),
embedding_norm.weight, embedding_norm.bias, and of a head: head_dense, head_output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tandem_engine.encoder.config import EncoderConfig
from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.sources import NormSource, Plan, Source, TableSource, linear
from tandem_engine.ops.base import EncoderActivation

_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DISTILBERT_EPS = 1e-12
"""Fixed in DistilBERT's code, not in its configuration."""


@dataclass(frozen=True)
class HeadNames:
    """The modules of a `*ForSequenceClassification` head; its activation between the two layers."""

    dense: str
    output: str
    activation: Callable[[Any], Any]
    """Takes a tensor [num_runs, hidden_size]."""


@dataclass(frozen=True)
class LayerNames:
    """The modules of one layer, below the layer."""

    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


@dataclass(frozen=True)
class EncoderFamily:
    """The names of one family's modules in checkpoints."""

    prefix: str
    """Before all names where the checkpoint has a head."""
    layers: str
    layer: LayerNames
    head: HeadNames
    has_token_types: bool = True
    pads_positions: bool = False
    """Whether positions start behind the padding's (RoBERTa)."""

    def encoder(self, config: Any) -> EncoderConfig:
        """Return the encoder of a transformers configuration; raises ModelUnusable."""
        _check(config)
        first = config.pad_token_id + 1 if self.pads_positions else 0
        return EncoderConfig(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            inner_size=getattr(config, "intermediate_size", None) or config.hidden_dim,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_positions=config.max_position_embeddings - first,
            first_position=first,
            num_token_types=config.type_vocab_size if self.has_token_types else 0,
            norm_eps=getattr(config, "layer_norm_eps", _DISTILBERT_EPS),
            activation=_activation(config),
        )

    def plan(self, encoder: EncoderConfig, stored: Collection[str], *, has_head: bool) -> Plan:
        """Return the source of every weight; `stored` are the checkpoint's names."""
        prefix = f"{self.prefix}." if any(name.startswith(f"{self.prefix}.") for name in stored) else ""
        embeddings = f"{prefix}embeddings"
        plan: dict[str, Source] = {
            "word_embeddings": TableSource(f"{embeddings}.word_embeddings.weight"),
            "position_embeddings": TableSource(f"{embeddings}.position_embeddings.weight"),
        }
        if self.has_token_types:
            plan["token_type_embeddings"] = TableSource(f"{embeddings}.token_type_embeddings.weight")
        plan |= _norm("embedding_norm", f"{embeddings}.LayerNorm", stored)
        for index in range(encoder.num_layers):
            plan |= self._layer(f"layers.{index}", f"{prefix}{self.layers}.{index}", stored)
        if has_head:
            plan["head_dense"] = linear(self.head.dense, bias=True)
            plan["head_output"] = linear(self.head.output, bias=True)
        return plan

    def _layer(self, ours: str, theirs: str, stored: Collection[str]) -> Plan:
        names = self.layer
        projections = (f"{theirs}.{name}" for name in (names.query, names.key, names.value))
        return {
            f"{ours}.qkv": linear(*projections, bias=True),
            f"{ours}.output": linear(f"{theirs}.{names.output}", bias=True),
            **_norm(f"{ours}.attention_norm", f"{theirs}.{names.attention_norm}", stored),
            f"{ours}.up": linear(f"{theirs}.{names.up}", bias=True),
            f"{ours}.down": linear(f"{theirs}.{names.down}", bias=True),
            **_norm(f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}", stored),
        }


def _norm(ours: str, theirs: str, stored: Collection[str]) -> Plan:
    """Return a norm's two vectors; checkpoints that were converted from TensorFlow call them gamma and beta."""
    weight, bias = ("gamma", "beta") if f"{theirs}.gamma" in stored else ("weight", "bias")
    return {f"{ours}.weight": NormSource(f"{theirs}.{weight}"), f"{ours}.bias": NormSource(f"{theirs}.{bias}")}


def _check(config: Any) -> None:
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ModelUnusable(
            f"{config.model_type} has {kind} position embeddings; absolute ones alone are built: choose another model"
        )
    if getattr(config, "is_decoder", False):
        raise ModelUnusable(f"{config.model_type} is used as a decoder (is_decoder); encoders alone are built")
    if config.hidden_size % config.num_attention_heads:
        raise ModelUnusable(
            f"config.json has hidden_size {config.hidden_size}, which its {config.num_attention_heads} attention heads "
            "do not divide; download the checkpoint anew"
        )


def _activation(config: Any) -> EncoderActivation:
    name = getattr(config, "hidden_act", None) or config.activation
    if name not in _ACTIVATIONS:
        raise ModelUnusable(
            f"{config.model_type} has the activation {name}; built are {', '.join(_ACTIVATIONS)}: choose another model"
        )
    return _ACTIVATIONS[name]


_BERT_LAYER = LayerNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_DISTILBERT_LAYER = LayerNames(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_ROBERTA = EncoderFamily(
    prefix="roberta",
    layers="encoder.layer",
    layer=_BERT_LAYER,
    head=HeadNames("classifier.dense", "classifier.out_proj", lambda x: x.tanh()),
    pads_positions=True,
)
FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(
        prefix="bert",
        layers="encoder.layer",
        layer=_BERT_LAYER,
        head=HeadNames("bert.pooler.dense", "classifier", lambda x: x.tanh()),
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": EncoderFamily(
        prefix="distilbert",
        layers="transformer.layer",
        layer=_DISTILBERT_LAYER,
        head=HeadNames("pre_classifier", "classifier", lambda x: x.relu()),
        has_token_types=False,
    ),
}
"""By `model_type` of the transformers configuration."""
