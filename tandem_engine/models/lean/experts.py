"""Which experts see a token, and how do their answers become one?

Tokens are grouped by expert, so that each expert's weights are read once per step. A token's answers are added in the
order of its own choice, whoever shares its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        """Return the chosen experts' answers, weighted and added: [num_tokens, hidden_size]."""
        shares, chosen = self._choose(x)
        return added(answers_of(self._answer, x, chosen, self._config.num_experts), shares)

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's shares and experts, [num_tokens, num_chosen], the likeliest first."""
        shares, chosen = self._ops.linear(x, self._router).softmax(-1).topk(self._config.num_chosen, -1)
        return (shares / shares.sum(-1, keepdim=True) if self._config.normalised else shares), chosen

    def _answer(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gated = self._ops.gated(self._ops.linear(x, self._gate_up[expert]), self._activation)
        return self._ops.linear(gated, self._down[expert])


def answers_of(
    answer: Callable[[int, torch.Tensor], torch.Tensor], x: torch.Tensor, chosen: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return what each of `chosen` [num_tokens, num_chosen] says of its token, [num_tokens, num_chosen, hidden_size].

    `answer` is called once for each expert that anyone chose, with that expert and its rows of `x`.
    """
    by_expert = chosen.flatten().argsort(stable=True)  # indices of (token, choice)
    counts = chosen.flatten().bincount(minlength=num_experts).tolist()
    asked = x.index_select(0, by_expert // chosen.shape[1])
    said = torch.empty_like(asked)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(end, end := end + count)
            said[rows] = answer(expert, asked[rows])
    answers = torch.empty_like(said)
    answers[by_expert] = said
    return answers.view(*chosen.shape, -1)


def added(answers: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return `answers` [num_tokens, num_chosen, hidden_size] by their `shares` and added, first to last."""
    answers *= shares.unsqueeze(-1)
    total = answers[:, 0]
    for choice in range(1, answers.shape[1]):
        total = total + answers[:, choice]
    return total
