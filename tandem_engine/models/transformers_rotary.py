"""How do rotary embeddings that a model of transformers computes for each step become the op layer's tables?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem_engine.execution.attention import Turned
from tandem_engine.ops.base import Ops, Rotary, Step


class StepTables:
    """Tables that each step's embeddings are copied into: ops meet the same ones again, and need not prepare anew."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._tables: dict[int, Rotary] = {}

    def of_step(self) -> Callable[[Step, torch.Tensor, torch.Tensor], Turned | None]:
        """Return `AttentionStep.turned` for one step; embeddings are copied when a layer first brings them."""
        rotaries: dict[int, tuple[torch.Tensor, Rotary | None]] = {}  # kept, so that an id names one tensor
        steps: dict[int, Step] = {}

        def turned(step: Step, cos: torch.Tensor, sin: torch.Tensor) -> Turned | None:
            if id(cos) not in rotaries:
                rotaries[id(cos)] = (cos, self._copied(len(rotaries), cos, sin))
            rotary = rotaries[id(cos)][1]
            if rotary is None:
                return None
            if id(step) not in steps:
                steps[id(step)] = self._ops.step(torch.arange(len(step.positions)), step.slots, step.runs)
            return Turned(steps[id(step)], rotary)

        return turned

    def _copied(self, index: int, cos: torch.Tensor, sin: torch.Tensor) -> Rotary | None:
        num_tokens, half = cos.shape[1], cos.shape[2] // 2
        if cos.dtype != torch.float32 or len(cos) != 1 or not (_is_by_halves(cos, half) and _is_by_halves(sin, half)):
            return None
        rotary = self._table(index, num_tokens, half)
        rotary.cos[:num_tokens] = cos[0, :, :half]
        rotary.sin[:num_tokens] = sin[0, :, :half]
        return rotary

    def _table(self, index: int, num_tokens: int, half: int) -> Rotary:
        table = self._tables.get(index)
        if table is None or len(table.cos) < num_tokens or table.cos.shape[1] != half:
            table = self._tables[index] = _empty_table(2 * num_tokens, half)
        return table


def _empty_table(num_tokens: int, half: int) -> Rotary:
    return Rotary(torch.empty(num_tokens, half), torch.empty(num_tokens, half))


def _is_by_halves(table: torch.Tensor, half: int) -> bool:
    """Return whether dimensions i and `half` + i of `table` [1, num_tokens, rotary_dim] turn alike."""
    return torch.equal(table[..., :half], table[..., half:])
