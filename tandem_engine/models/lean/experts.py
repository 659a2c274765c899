"""Computes the mixture of experts of a layer.

Tokens are grouped by expert, so that each expert's weights are read once per step. A token's expert outputs are added
in the order of the router's choice for that token, whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem_engine.models.lean.config import ExpertsConfig
from tandem_engine.ops.base import Activation, Ops, Weight


class Experts:
    """The mixture of experts of one layer."""

    def __init__(self, config: ExpertsConfig, activation: Activation, linears: Mapping[str, Weight], ops: Ops) -> None:
        self._config = config
        self._activation = activation
        self._ops = ops
        self._router = linears["router"]
        self._gate_up = [linears[f"experts.{expert}.gate_up"] for expert in range(config.num_experts)]
        self._down = [linears[f"experts.{expert}.down"] for expert in range(config.num_experts)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs: [num_tokens, hidden_size]."""
        shares, chosen = self._choose(x)
        return _weighted_sum(self._outputs(x, chosen), shares)

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's weights and experts, both [num_tokens, num_chosen], by falling probability."""
        shares, chosen = self._ops.linear(x, self._router).softmax(-1).topk(self._config.num_chosen, -1)
        return (shares / shares.sum(-1, keepdim=True) if self._config.normalised else shares), chosen

    def _outputs(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the output of each of the `chosen` experts for its token: [num_tokens, num_chosen, hidden_size]."""
        by_expert = chosen.flatten().argsort(stable=True)  # indices of (token, choice)
        counts = chosen.flatten().bincount(minlength=self._config.num_experts).tolist()
        inputs = x.index_select(0, by_expert // chosen.shape[1])
        grouped = torch.empty_like(inputs)
        end = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(end, end := end + count)
                grouped[rows] = self._run(expert, inputs[rows])
        outputs = torch.empty_like(grouped)
        outputs[by_expert] = grouped
        return outputs.view(*chosen.shape, -1)

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gated = self._ops.gated(self._ops.linear(x, self._gate_up[expert]), self._activation)
        return self._ops.linear(gated, self._down[expert])


def _weighted_sum(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Weight `outputs` [num_tokens, num_chosen, hidden_size] in place by `shares`, and add the first to the last."""
    outputs *= shares.unsqueeze(-1)
    total = outputs[:, 0]
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice]
    return total
