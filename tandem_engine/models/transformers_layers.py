"""How do the known blocks of a model of transformers run on the op layer, one by one or all layers at once?

Where a decoder's code and its layers' are known, too, its first layer computes what all of them would, as one op, and
the others hand it on. The decoder itself, its embeddings, masks and last norm, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tandem_engine.execution.attention import STEP_KEYWORD, Asked, AttentionStep
from tandem_engine.models.known_code import digest_of
from tandem_engine.ops.base import Activation, HeadNorm, LayerParts, Layers, Ops, Rotary, Weight

_LAYERS = {"6361a29f94924856"}
"""Digests of layers' `forward`: input_layernorm, self_attn, added; post_attention_layernorm, mlp, added."""

_DECODERS = {
    "bbc7bdf3a6531d6f",  # Llama, Seed-OSS
    "8cb29ab9a039b341",  # Mistral
    "4afdb83ebc79e856",  # Qwen2, Qwen3, SmolLM3
}
"""Digests of decoders' `forward`: each layer once, in order, on what the one before it returned."""

_FOLDER = f"{Path(transformers.__file__).parent}/"


class OwnMLP:
    """A gated MLP whose code is known."""

    def __init__(self, gate_up: Weight, down: Weight, activation: Activation, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation: Activation = activation
        self._ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what transformers' own does, float32 [..., hidden_size]."""
        rows = self._ops.linear(x.reshape(-1, self.gate_up.in_features), self.gate_up)
        gated = self._ops.gated(rows, self.activation)
        return self._ops.linear(gated, self.down).view(*x.shape[:-1], self.down.out_features)


class OwnAttention:
    """Attention whose code is known."""

    def __init__(
        self,
        original: Callable[..., tuple[torch.Tensor, None]],
        qkv: Weight,
        output: Weight,
        num_heads: int,
        asked: Asked,
        norm: HeadNorm | None,
        turns: bool,
        ops: Ops,
    ) -> None:
        self._original = original
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.asked = asked
        self.norm = norm
        self.turns = turns
        self._ops = ops

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return what transformers' own does, float32 [1, num_tokens, hidden_size], and no attention weights."""
        step = kwargs.get(STEP_KEYWORD)
        if not isinstance(step, AttentionStep) or attention_mask is not None or position_embeddings is None:
            return self._original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        layer, scale, window, softcap = self.asked
        of_group, index = step.pool.place(step.step, layer)
        turned = step.turned(of_group, *position_embeddings)
        if turned is None:
            return self._original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        ops, pool = self._ops, step.pool
        query = ops.rope_and_kv_write(
            ops.linear(hidden_states[0], self.qkv),
            self.num_heads,
            turned.step,
            pool,
            index,
            turned.rotary if self.turns else None,
            self.norm,
        )
        step.when_written(layer)
        attended = ops.paged_attention(
            query, self.num_heads, of_group, pool, index, scale=scale, window=window, softcap=softcap
        )
        return ops.linear(attended, self.output).unsqueeze(0), None


@dataclass(frozen=True)
class OwnBlocks:
    """A model's modules that compute on the op layer."""

    norms: Mapping[nn.Module, tuple[torch.Tensor, float]]
    """Weight, anything added, and epsilon."""
    mlps: Mapping[nn.Module, OwnMLP]
    attentions: Mapping[nn.Module, OwnAttention]


def run_layers_at_once(model: Any, blocks: OwnBlocks, ops: Ops) -> None:
    """Let a decoder's layers run as one op, if all of it is known and the backend does that."""
    decoder = getattr(model, model.base_model_prefix, None)
    if decoder is None or _digest_of_forward(decoder) not in _DECODERS:
        return
    layers = list(decoder.layers)
    parts = [_parts_of(layer, blocks) for layer in layers]
    if len(layers) != decoder.config.num_hidden_layers or any(each is None for each in parts):
        return
    known = [each for each in parts if each is not None]
    if [each.asked.layer for each in known] != list(range(len(known))) or ops.layers([known[0].of(None)]) is None:
        return
    all_layers = _AllLayers(known, layers[0].forward, ops)
    layers[0].forward = all_layers.forward
    for layer in layers[1:]:
        layer.forward = _handing_on(layer.forward)


def _digest_of_forward(module: Any) -> str:
    """Return the digest of `forward` below transformers' own decorators; "" below anybody else's, or if replaced."""
    if "forward" in vars(module):
        return ""
    function = type(module).forward
    while hasattr(function, "__wrapped__"):
        if not function.__code__.co_filename.startswith(_FOLDER):
            return ""
        function = function.__wrapped__
    return digest_of(function)


@dataclass(frozen=True)
class _Parts:
    """What a known layer is made of, but for its rotary embeddings, which come with each step."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    eps: float
    attention: OwnAttention
    mlp: OwnMLP

    @property
    def asked(self) -> Asked:
        return self.attention.asked

    def of(self, rotary: Rotary | None) -> LayerParts:
        return LayerParts(
            input_norm=self.input_norm,
            qkv=self.attention.qkv,
            head_norm=self.attention.norm,
            rotary=rotary if self.attention.turns else None,
            num_heads=self.attention.num_heads,
            scale=self.asked.scale,
            window=self.asked.window,
            softcap=self.asked.softcap,
            output=self.attention.output,
            attention_output_norm=None,
            mlp_norm=self.mlp_norm,
            gate_up=self.mlp.gate_up,
            activation=self.mlp.activation,
            down=self.mlp.down,
            mlp_output_norm=None,
            eps=self.eps,
        )


def _parts_of(layer: Any, blocks: OwnBlocks) -> _Parts | None:
    if _digest_of_forward(layer) not in _LAYERS:
        return None
    norms = blocks.norms.get(layer.input_layernorm), blocks.norms.get(layer.post_attention_layernorm)
    attention, mlp = blocks.attentions.get(layer.self_attn), blocks.mlps.get(layer.mlp)
    if norms[0] is None or norms[1] is None or norms[0][1] != norms[1][1] or attention is None or mlp is None:
        return None
    return _Parts(norms[0][0], norms[1][0], norms[0][1], attention, mlp)


class _AllLayers:
    def __init__(self, parts: list[_Parts], first: Callable[..., torch.Tensor], ops: Ops) -> None:
        self._parts = parts
        self._first = first
        self._ops = ops
        self._rotary: Rotary | None = None
        self._layers: Layers | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return what the last layer would, float32 [1, num_tokens, hidden_size]; of rows nobody samples, anything.

        Or what the first layer would, where the step is of a kind that is not known.
        """
        step = kwargs.get(STEP_KEYWORD)
        turned = None
        if position_embeddings is not None and isinstance(step, AttentionStep) and not step.pool.places:
            turned = step.turned(step.step, *position_embeddings)
        if turned is None or attention_mask is not None or hidden_states.dtype != torch.float32:
            kwargs |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return self._first(hidden_states, **kwargs)
        assert isinstance(step, AttentionStep), "else nothing is turned"
        x = hidden_states[0].contiguous()  # known decoders have no other use for it
        rows = torch.arange(len(x)) if step.sample_rows is None else step.sample_rows
        sampled, more = self._of(turned.rotary).forward(
            x, turned.step, step.pool, rows, lambda: step.when_written(len(self._parts) - 1)
        )
        step.are_layers_done = True
        x[rows] = sampled.add_(more)
        return x.unsqueeze(0)

    def _of(self, rotary: Rotary) -> Layers:
        if self._layers is None or rotary is not self._rotary:  # tables grow now and then
            self._layers, self._rotary = self._ops.layers([parts.of(rotary) for parts in self._parts]), rotary
        assert self._layers is not None, "asked before"
        return self._layers


def _handing_on(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
        step = kwargs.get(STEP_KEYWORD)
        if isinstance(step, AttentionStep) and step.are_layers_done:
            return hidden_states
        return original(hidden_states, *arguments, **kwargs)

    return forward
