"""From which tensors of a checkpoint is each weight of the decoder made?

The decoder's weights have our names. Of layer i, each after "layers.{i}.":

    input_norm  qkv  query_norm?  key_norm?  output  attention_output_norm?
    mlp_norm  (gate_up  down | router  experts.{e}.gate_up  experts.{e}.down)  mlp_output_norm?

and beside the layers: embeddings (unless tied), final_norm, head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSource:
    """A linear layer made of matrices one above the other, and of as many biases, or none."""

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormSource:
    """A norm's weight, float32; Gemma stores it less 1."""

    name: str
    offset: float = 0.0


@dataclass(frozen=True)
class TableSource:
    """A matrix of which only rows are read: the embeddings."""

    name: str


Source = LinearSource | NormSource | TableSource
Plan = Mapping[str, Source]
"""Our name -> where it comes from, in the order of loading."""


def linear(*modules: str, bias: bool = False) -> LinearSource:
    """Return the fused linear layer of some modules of the checkpoint."""
    weights = tuple(f"{module}.weight" for module in modules)
    return LinearSource(weights, tuple(f"{module}.bias" for module in modules) if bias else ())


def attention(layer: str, *, bias: bool = False, output_bias: bool = False, head_norms: float | None = None) -> Plan:
    """Return the attention weights as Llama names them; `head_norms` is the offset of query and key norms, if any."""
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
    """Return the weights of an MLP as Llama names them."""
    return {
        "gate_up": linear(f"{module}.gate_proj", f"{module}.up_proj", bias=bias),
        "down": linear(f"{module}.down_proj", bias=bias),
    }


def experts(router: str, module: str, num_experts: int, gate: str, up: str, down: str) -> Plan:
    """Return a router's weights and those of each expert, whose matrices are called `gate`, `up` and `down`."""
    plan: dict[str, Source] = {"router": linear(router)}
    for expert in range(num_experts):
        name = f"{module}.{expert}"
        plan[f"experts.{expert}.gate_up"] = linear(f"{name}.{gate}", f"{name}.{up}")
        plan[f"experts.{expert}.down"] = linear(f"{name}.{down}")
    return plan


def pre_norms(layer: str) -> Plan:
    """Return the two norms of a layer as Llama names them."""
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
