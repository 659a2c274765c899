"""Plain greedy rows are sampled on the device; the rows that go to the host are the others, all in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tandem_engine.ops import plain_sampling
from tandem_engine.ops.device_sampling import DeviceSampler
from tandem_engine.ops.sampling import RowSample, SamplingRow, UnusableLogits

GREEDY = SamplingRow([1, 2], 7, temperature=0.0)
OTHERS = (
    SamplingRow([3], 7, temperature=0.8, top_p=0.9),
    SamplingRow([4], 7, temperature=0.0, num_top=2),
    SamplingRow([5], 7, temperature=0.0, allowed=np.array([0b110], np.int32)),
)


class _Host:
    """Samples in numpy, and keeps what came in each call."""

    def __init__(self) -> None:
        self.calls: list[list[SamplingRow]] = []

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        self.calls.append(list(rows))
        return plain_sampling.sample(logits, rows)


def _sampler() -> tuple[DeviceSampler, _Host]:
    host = _Host()
    return DeviceSampler(torch.device("cpu"), host.sample), host


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (1, 2, 3), (0,), ()])
def test_a_step_of_greedy_and_other_rows_gives_the_tokens_of_plain_sampling(order: Sequence[int]) -> None:
    rows = [(GREEDY, *OTHERS)[index] for index in order]
    sampler, host = _sampler()
    for seed in range(3):  # the buffer of the copy is used again
        logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(seed))
        assert sampler.sample(logits, rows) == (plain_sampling.sample(logits, rows) if rows else [])
    others = [row for row in rows if row is not GREEDY]
    assert host.calls == ([others] * 3 if others else [])


def test_of_equal_logits_the_lower_id_is_taken() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-torch.inf, -1.0, -torch.inf, -1.0]])
    sampler, _ = _sampler()
    assert [row.token_ids for row in sampler.sample(logits, [GREEDY, GREEDY])] == [[1, 1], [1, 1]]


def test_unusable_rows_of_the_host_have_their_index_in_the_step() -> None:
    logits = torch.zeros(3, 40)
    logits[2, 5] = torch.nan
    sampler, _ = _sampler()
    with pytest.raises(UnusableLogits, match="not numbers") as failure:
        sampler.sample(logits, [OTHERS[0], GREEDY, OTHERS[1]])
    assert failure.value.rows == (2,)
