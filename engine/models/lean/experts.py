"""Which experts see a token, and how do their answers become one?

Tokens are grouped by expert, so that each expert's weights are read once per step. A token's answers are added in the
order of its own choice, whoever shares its step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.models.lean.config import ExpertsConfig
from engine.ops.base import Activation, Ops, Weight


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
        """Return the chosen experts' answers, weighted and added: [num_tokens, hidden_size]."""
        shares, chosen = self._choose(x)
        answers = self._answers(x, chosen)
        answers *= shares.unsqueeze(-1)
        total = answers[:, 0]
        for choice in range(1, self._config.num_chosen):
            total = total + answers[:, choice]
        return total

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's shares and experts, [num_tokens, num_chosen], the likeliest first."""
        shares, chosen = self._ops.linear(x, self._router).softmax(-1).topk(self._config.num_chosen, -1)
        return (shares / shares.sum(-1, keepdim=True) if self._config.normalised else shares), chosen

    def _answers(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what each chosen expert says, [num_tokens, num_chosen, hidden_size]."""
        by_expert = chosen.flatten().argsort(stable=True)  # indices of (token, choice)
        counts = chosen.flatten().bincount(minlength=self._config.num_experts).tolist()
        asked = x.index_select(0, by_expert // self._config.num_chosen)
        said = torch.empty_like(asked)
        end = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(end, end := end + count)
                gated = self._ops.gated(self._ops.linear(asked[rows], self._gate_up[expert]), self._activation)
                said[rows] = self._ops.linear(gated, self._down[expert])
        answers = torch.empty_like(said)
        answers[by_expert] = said
        return answers.view(*chosen.shape, -1)
