"""Names the checkpoint tensors that each weight of the decoder is made of.

The decoder's weights have our names. Of layer i, each after "layers.{i}." ("?": some families lack it):

    input_norm?  qkv  query_projection_norm?  key_projection_norm?  query_norm?  key_norm?  output
    attention_output_norm?  mlp_norm?
    (gate_up  down | router  experts.{e}.gate_up  experts.{e}.down)  mlp_output_norm?

Outside the layers: embeddings (unless tied), final_norm, head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSource:
    """A linear layer made of stacked matrices, and of as many biases or none."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormSource:
    """A norm's weight, float32; `offset` is added to the stored value (Gemma stores the weight minus 1)."""

    name: str
    offset: float = 0.0


@dataclass(frozen=True)
class TableSource:
    """The embeddings: a matrix whose rows are looked up."""

    name: str


Source = LinearSource | NormSource | TableSource
Plan = Mapping[str, Source]
"""Our name -> source, in the order of loading."""


def linear(*modules: str, bias: bool = False) -> LinearSource:
    """Return the fused linear layer of several modules of the checkpoint."""
    weights = tuple(f"{module}.weight" for module in modules)
    return LinearSource(weights, tuple(f"{module}.bias" for module in modules) if bias else ())


def attention(layer: str, *, bias: bool = False, output_bias: bool = False, head_norms: float | None = None) -> Plan:
    """Return the attention weights by Llama's names.

    `head_norms` is the offset of the norms of each query and key head; None: the family has no such norms.
    """
    module = f"{layer}.self_attn"
    plan: dict[str, Source] = {
        "qkv": linear(f"{module}.q_proj", f"{module}.k_proj", f"{module}.v_proj", bias=bias),
        "output": linear(f"{module}.o_proj", bias=output_bias),
    }
    if head_norms is not None:
        plan["query_norm"] = NormSource(f"{module}.q_norm.weight", head_norms)
        plan["key_norm"] = NormSource(f"{module}.k_norm.weight", head_norms)
    return plan


def gated_mlp(module: str, *, bias: bool = False) -> Plan:
    """Return the weights of an MLP by Llama's names."""
    return {
        "gate_up": linear(f"{module}.gate_proj", f"{module}.up_proj", bias=bias),
        "down": linear(f"{module}.down_proj", bias=bias),
    }


def experts(router: str, module: str, num_experts: int, gate: str, up: str, down: str) -> Plan:
    """Return the weights of a router and of its experts; the experts' matrices are called `gate`, `up` and `down`."""
    plan: dict[str, Source] = {"router": linear(router)}
    for expert in range(num_experts):
        name = f"{module}.{expert}"
        plan[f"experts.{expert}.gate_up"] = linear(f"{name}.{gate}", f"{name}.{up}")
        plan[f"experts.{expert}.down"] = linear(f"{name}.{down}")
    return plan


def pre_norms(layer: str) -> Plan:
    """Return the two norms of a layer by Llama's names."""
    return {
        "input_norm": NormSource(f"{layer}.input_layernorm.weight"),
        "mlp_norm": NormSource(f"{layer}.post_attention_layernorm.weight"),
    }


def sandwich_norms(layer: str, offset: float) -> Plan:
    """Return the four norms of a Gemma layer: before and after attention, before and after the MLP."""
    return {
        "input_norm": NormSource(f"{layer}.input_layernorm.weight", offset),
        "attention_output_norm": NormSource(f"{layer}.post_attention_layernorm.weight", offset),
        "mlp_norm": NormSource(f"{layer}.pre_feedforward_layernorm.weight", offset),
        "mlp_output_norm": NormSource(f"{layer}.post_feedforward_layernorm.weight", offset),
    }
