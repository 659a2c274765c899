"""Updates weights: Muon for the matrices of the layers, AdamW for the embedding and the norms."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

_WEIGHT_DECAY = 0.05
_EMBEDDING_RATE = 0.75
"""The embedding's learning rate as a share of the matrices'."""


class TrainingOptimiser:
    """One step over all parameters, with a state that is plain named tensors.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) is scaled to AdamW's update size (Liu et al.,
    arXiv:2502.16982, section 2.2), so that one learning rate serves both.
    """

    def __init__(self, model: nn.Module, *, use_muon: bool = True) -> None:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if use_muon and p.dim() == 2 and "embed" not in name}
        rest = {name: p for name, p in named.items() if name not in matrices}
        adamw = AdamW(rest.values(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._parts: list[tuple[Optimizer, list[str], float]] = [(adamw, list(rest), _EMBEDDING_RATE)]
        if matrices:
            muon = Muon(matrices.values(), lr=1.0, weight_decay=_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
            self._parts.append((muon, list(matrices), 1.0))

    def step(self, learning_rate: float) -> None:
        """Update every parameter from its gradient, then clear the gradients."""
        for optimiser, _, share in self._parts:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all state, named `parameter/what`."""
        state: dict[str, Tensor] = {}
        for optimiser, names, _ in self._parts:
            for name, parameter in zip(names, _parameters(optimiser), strict=True):
                state |= {f"{name}/{what}": tensor for what, tensor in optimiser.state[parameter].items()}
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_tensors` of an equal model."""
        for optimiser, names, _ in self._parts:
            for name, parameter in zip(names, _parameters(optimiser), strict=True):
                found = {key.split("/")[1]: value for key, value in state.items() if key.split("/")[0] == name}
                optimiser.state[parameter] = {what: tensor.clone() for what, tensor in found.items()}


def _parameters(optimiser: Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


class WeightAverage:
    """An exponential moving average of the weights: nearly as good as a cool-down, and available at any moment."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], decay: float = 0.997) -> None:
        self._decay = decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters}

    @torch.no_grad()
    def update(self, parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Move towards the current weights; early on faster, so that the first random weights are soon forgotten."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in parameters:
            self.tensors[name].lerp_(parameter.detach(), 1.0 - decay)
