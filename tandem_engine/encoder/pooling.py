"""Makes one vector of each run's token vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from tandem_engine.encoder.messages import Pooling

_LEAST_LENGTH = 1e-12
"""A shorter vector is divided by this, as torch.nn.functional.normalize does."""


def pool(hidden: torch.Tensor, starts: torch.Tensor, poolings: Sequence[Pooling]) -> torch.Tensor:
    """Return [num_runs, hidden_size] of `hidden` [num_tokens, hidden_size]; `starts` as in `Ops.self_attention`."""
    runs = zip(pairwise(starts.tolist()), poolings, strict=True)
    return torch.stack([_pooled(hidden[first:end], pooling) for (first, end), pooling in runs])


def _pooled(run: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    match pooling:
        case "mean":
            return run.sum(0).div_(len(run))
        case "cls":
            return run[0]
        case "last":
            return run[-1]


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Return each row of `x` [num_runs, features] with the length 1."""
    return x / x.square().sum(-1, keepdim=True).sqrt_().clamp_min_(_LEAST_LENGTH)
