"""Samples on a device: plain greedy rows there, all other rows on the host, with one copy and one wait.

    device    code of each row, int64 | logits of the rows that are not plain greedy, float32
                                   one copy, one wait
    host      code of each row        | the C++ sampler, or numpy without a compiler

A plain greedy row needs its largest logit alone: 8 bytes of a row cross, not its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem_engine.ops.sampling import RowSample, SamplingRow, UnusableLogits, is_plain_greedy, refuse

HostSample = Callable[[torch.Tensor, Sequence[SamplingRow]], list[RowSample]]
"""`Ops.sample` for logits in host memory."""

_NOT_NUMBERS, _NOTHING_LEFT = -1, -2
_CODE_BYTES = 8


class DeviceSampler:
    """Samples rows whose logits are on `device`; `host_sample` samples those that are not plain greedy."""

    def __init__(self, device: torch.device, host_sample: HostSample) -> None:
        self._is_pinned = device.type == "cuda"
        self._host_sample = host_sample
        self._host = torch.empty(0, dtype=torch.uint8)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        """See `Ops.sample`; waits for the device once."""
        if not rows:
            return []
        others = [index for index, row in enumerate(rows) if not is_plain_greedy(row)]
        codes, taken = self._download(_codes(logits), _rows(logits, others))
        greedy = [index for index, row in enumerate(rows) if is_plain_greedy(row)]
        refuse(*([index for index in greedy if codes[index] == why] for why in (_NOT_NUMBERS, _NOTHING_LEFT)))
        samples = [RowSample([code] * len(row.seeds)) for code, row in zip(codes, rows, strict=True)]
        for index, sampled in zip(others, self._sample_on_host(taken, rows, others), strict=True):
            samples[index] = sampled
        return samples

    def _sample_on_host(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], others: Sequence[int]
    ) -> list[RowSample]:
        if not others:
            return []
        try:
            return self._host_sample(logits, [rows[index] for index in others])
        except UnusableLogits as error:
            raise UnusableLogits([others[row] for row in error.rows], error.message) from error

    def _download(self, codes: torch.Tensor, logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Copy both to the host, in one copy; the logits are valid until the next call."""
        parts = torch.cat((codes.view(torch.uint8), logits.flatten().view(torch.uint8)))
        if len(self._host) < len(parts):
            self._host = torch.empty(2 * len(parts), dtype=torch.uint8, pin_memory=self._is_pinned)
        here = self._host[: len(parts)]
        here.copy_(parts)
        num_code_bytes = _CODE_BYTES * len(codes)
        token_ids: list[int] = here[:num_code_bytes].view(torch.int64).tolist()
        return token_ids, here[num_code_bytes:].view(torch.float32).view(logits.shape)


def _codes(logits: torch.Tensor) -> torch.Tensor:
    """Return the token with the largest logit of each row, the lower id on ties, or why there is none; int64."""
    largest, token_ids = logits.max(-1)  # NaN counts as the largest
    codes = torch.where(largest > -torch.inf, token_ids, _NOTHING_LEFT)
    return torch.where(largest < torch.inf, codes, _NOT_NUMBERS)


def _rows(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return these rows, contiguous."""
    if len(indices) == len(logits):
        return logits.contiguous()
    places = torch.tensor(indices, dtype=torch.int64)
    return logits.index_select(0, places.to(logits.device, non_blocking=True))
