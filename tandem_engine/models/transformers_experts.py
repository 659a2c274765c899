"""How do the mixtures of experts of transformers run on the op layer?

Their experts' matrices lie in two parameters, [num_experts, ...], and their routers multiply by one of their own, so
neither is a linear layer that `use_own_linears` would find; and how torch rounds depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from tandem_engine.models.lean.experts import added, answers_of
from tandem_engine.ops.base import Activation, Ops, Weight

_ROWS_PER_TILE = 32


def use_own_experts(model: Any, ops: Ops) -> None:
    """Put experts made of our linear layers in the place of transformers', and run its routers in tiles of one shape.

    Those of a structure that is not known stay as they are.
    """
    for module in list(model.modules()):
        if _is_router(module):
            module.forward = _in_tiles(module.forward, module.weight.shape[1])
    for name in [name for name, module in model.named_modules() if _are_plain_experts(module)]:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _OwnExperts(model.get_submodule(name), ops))


def _is_router(module: nn.Module) -> bool:
    """Return whether this is a matrix, one row per expert, and perhaps corrections, a number per expert."""
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    if not type(module).__name__.lower().endswith("topkrouter") or weight is None or weight.ndim != 2:
        return False
    return all(parameter.numel() == len(weight) for parameter in parameters.values())


def _in_tiles(forward: Callable[..., Any], features: int) -> Callable[..., Any]:
    """Return `forward` of rows [..., features], computed 32 at a time; its results have a row for each.

    What else it is given is for all rows: corrections, a number per expert.
    """

    def tiled(hidden_states: torch.Tensor, *of_all: torch.Tensor) -> Any:
        rows = hidden_states.reshape(-1, features)
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS_PER_TILE))
        parts = [forward(tile, *of_all) for tile in torch.split(padded, _ROWS_PER_TILE)]
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)[: len(rows)]
        return tuple(torch.cat(same)[: len(rows)] for same in zip(*parts, strict=True))

    return tiled


def _are_plain_experts(module: Any) -> bool:
    """Return whether these are gate and up in one, then down, without biases: what transformers' flags call so."""
    flags = ("has_gate", "is_concatenated", "has_bias", "is_transposed", "has_post_expert_norm")
    return (
        [getattr(module, flag, None) for flag in flags] == [True, True, False, False, False]
        and type(module)._apply_gate is moe._default_apply_gate
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
    )


class _OwnExperts(nn.Module):
    def __init__(self, module: Any, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._act_fn = module.act_fn
        self._activation = _activation(module.act_fn)
        self._gate_up = [_packed(matrix, ops) for matrix in module.gate_up_proj.detach()]
        self._down = [_packed(matrix, ops) for matrix in module.down_proj.detach()]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' answers to `hidden_states` [num_tokens, features], weighted and added, float32."""
        return added(answers_of(self._answer, hidden_states, top_k_index, len(self._down)), top_k_weights)

    def _answer(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(self._gated(self._ops.linear(x, self._gate_up[expert])), self._down[expert])

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._activation is not None:
            return self._ops.gated(gate_up, self._activation)
        gate, up = gate_up.chunk(2, -1)
        gated: torch.Tensor = self._act_fn(gate) * up
        return gated


def _packed(matrix: torch.Tensor, ops: Ops) -> Weight:
    return ops.pack(matrix if matrix.dtype in (torch.float32, torch.bfloat16) else matrix.float())


def _activation(act_fn: Any) -> Activation | None:
    """Return what the op layer calls it; None: it has none such."""
    if isinstance(act_fn, (nn.SiLU, type(ACT2FN["silu"]))):
        return "silu"
    return "gelu_tanh" if isinstance(act_fn, type(ACT2FN["gelu_pytorch_tanh"])) else None
