"""Holds the weights of a loaded decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tandem_engine.ops.base import Rotary, Weight

ROTARY_PREFIX = "rotary."
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class LeanWeights:
    """Weights by our names (see `sources`), in private or shared memory."""

    linears: dict[str, Weight] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norms, float32, any offset added; embeddings, float32 or bfloat16; tables "rotary.{kind}.cos" and ".sin"."""
    mapped_bytes: int = 0
    """Bytes that are read from a file which processes share; 0: the weights are private."""

    def layer(self, index: int) -> LeanWeights:
        """Return the weights of one layer by their names in the layer."""
        prefix = f"layers.{index}."
        return LeanWeights(_below(self.linears, prefix), _below(self.tensors, prefix))

    @property
    def rotary(self) -> dict[str, Rotary]:
        """Return the rotary tables by layer type, "" if all layers share one."""
        tables = _below(self.tensors, ROTARY_PREFIX)
        kinds = [name.removesuffix(".cos") for name in tables if name.endswith(".cos")]
        return {kind: Rotary(tables[f"{kind}.cos"], tables[f"{kind}.sin"]) for kind in kinds}

    @property
    def num_bytes(self) -> int:
        packed = [tensor for weight in self.linears.values() for tensor in weight.tensors.values()]
        return sum(tensor.nbytes for tensor in (*packed, *self.tensors.values()))


def _below(entries: Mapping[str, _Entry], prefix: str) -> dict[str, _Entry]:
    return {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
