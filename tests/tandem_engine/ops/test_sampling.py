"""Every backend samples the same tokens from the same distribution, whatever is sampled beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem_engine.ops import plain_sampling
from tandem_engine.ops.device_sampling import DeviceSampler
from tandem_engine.ops.sampling import LogitChanges, RowSample, SamplingRow, UnusableLogits
from tests.tandem_engine.ops.cpu_machines import FLAGS, cpu_ops
from tests.tandem_engine.ops.wheel_kernels import wheel_ops

BACKENDS = ("plain", "device", *FLAGS)
KEPT = [{}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}]


def _sample(backend: str) -> Callable[[torch.Tensor, Sequence[SamplingRow]], list[RowSample]]:
    if backend == "device":  # what a GPU does, here on the CPU
        return DeviceSampler(torch.device("cpu"), plain_sampling.sample).sample
    return plain_sampling.sample if backend == "plain" else cpu_ops(backend).sample


def _logits(chance: np.random.Generator, vocab_size: int, kind: str) -> np.ndarray[Any, Any]:
    logits = chance.normal(0, 2, vocab_size).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "ruled out":
        logits[1:][chance.random(vocab_size - 1) < 0.5] = -np.inf
    return logits * 8 if kind == "peaked" else logits


def _sampled_one_by_one(logits: np.ndarray[Any, Any], row: SamplingRow, seed: int) -> int:
    """Return the sample by its definition: everything sorted, noise for every token."""
    scaled = logits.astype(np.float64) / row.temperature
    order = [int(i) for i in np.lexsort((np.arange(len(logits)), -logits)) if logits[i] > -np.inf]
    order = order[: row.top_k or None]
    masses = [round(float(np.exp(scaled[i] - scaled[order[0]])) * 2**40) for i in order]
    if row.top_p < 1:
        order = [i for n, i in enumerate(order) if sum(masses[:n]) < row.top_p * sum(masses)]
    if row.min_p:
        order = [i for i in order if scaled[i] >= scaled[order[0]] + np.log(row.min_p)]
    words = np.random.Philox(key=np.array([seed, row.position], np.uint64)).random_raw(len(logits))
    uniform = [((int(word) >> 11) + 0.5) / 2**53 for word in words.tolist()]
    return max(order, key=lambda i: (scaled[i] - np.log(-np.log(uniform[i])), -i))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "ruled out"])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 333])
def test_a_draw_is_what_the_definition_says(backend: str, kind: str, vocab_size: int) -> None:
    chance = np.random.default_rng(vocab_size)
    for position, params in enumerate(KEPT):
        logits = _logits(chance, vocab_size, kind)
        seeds = [0, 2**64 - 1, *chance.integers(0, 2**63, 3).tolist()]
        row = SamplingRow(seeds, position, temperature=0.7, **params)  # type: ignore[arg-type]
        (sampled,) = _sample(backend)(torch.from_numpy(logits).unsqueeze(0), [row])
        assert sampled.token_ids == [_sampled_one_by_one(logits, row, seed) for seed in seeds], params


def _row(chance: np.random.Generator, vocab_size: int) -> SamplingRow:
    num = int(chance.integers(0, 8))
    changes = LogitChanges(
        token_ids=np.sort(chance.choice(vocab_size, num, replace=False)),
        bias=chance.normal(0, 3, num),
        is_seen=chance.random(num) < 0.5,
        minus=np.where(chance.random(num) < 0.2, np.inf, chance.normal(0, 1, num)),
        repetition_penalty=1.3,
    )
    return SamplingRow(
        seeds=chance.integers(0, 2**63, 4).tolist(),
        position=int(chance.integers(0, 10**6)),
        temperature=float(chance.choice([0.0, 1e-9, 0.1, 0.8, 100.0])),
        top_k=int(chance.choice([0, 1, 50, 10**9])),
        top_p=float(chance.choice([1.0, 1e-12, 0.9, 1 - 2**-53])),
        min_p=float(chance.choice([0.0, 0.05, 1.0])),
        changes=changes if chance.random() < 0.5 else None,
        allowed=chance.integers(-(2**31), 2**31, vocab_size // 32, np.int32) if chance.random() < 0.5 else None,
        num_top=[None, 0, 20][int(chance.integers(3))],
    )


def _tokens_and_ranks(sampled: Sequence[RowSample]) -> list[Any]:
    return [(row.token_ids, [(e.token_id, e.rank) for e in (*row.chosen, *row.top)]) for row in sampled]


@pytest.mark.parametrize("seed", range(20))
def test_machines_agree_on_every_bit_and_with_plain_sampling_on_every_token(seed: int) -> None:
    chance = np.random.default_rng(seed)
    vocab_size = int(chance.choice([64, 1000, 4097]))
    kinds = ["flat", "peaked", "ties", "ruled out"] * 2
    logits = torch.from_numpy(np.stack([_logits(chance, vocab_size, kind) for kind in kinds]))
    rows = [_row(chance, vocab_size) for _ in kinds]
    plain = plain_sampling.sample(logits, rows)
    by_machine = [ops.sample(logits, rows) for ops in (*map(cpu_ops, FLAGS), *wheel_ops())]
    assert all(by_machine[0] == other for other in by_machine[1:])
    assert _tokens_and_ranks(by_machine[0]) == _tokens_and_ranks(plain)
    for one, other in zip(by_machine[0], plain, strict=True):
        ours, theirs = ([e.logprob for e in (*row.chosen, *row.top)] for row in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_each_other_or_on_threads(backend: str) -> None:
    chance = np.random.default_rng(3)
    logits = torch.from_numpy(np.stack([_logits(chance, 500, "flat") for _ in range(9)]))
    rows = [_row(chance, 500) for _ in range(9)]
    together = _sample(backend)(logits, rows)
    assert together == [_sample(backend)(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    strided = torch.cat((logits, logits), 1)[:, :500]
    assert together == _sample(backend)(strided, rows)
    if backend in FLAGS:
        cpu_ops(backend).set_num_threads(3)
        try:
            assert together == _sample(backend)(logits, rows)
        finally:
            cpu_ops(backend).set_num_threads(1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 6}])
def test_draws_follow_the_softmax_of_what_is_kept(backend: str, params: dict[str, Any]) -> None:
    chance = np.random.default_rng(1)
    logits, times = torch.from_numpy(chance.normal(0, 1, 12).astype(np.float32)), 5000
    (sampled,) = _sample(backend)(logits.unsqueeze(0), [SamplingRow(range(times), 17, temperature=0.9, **params)])
    probabilities, order = torch.softmax(logits.double() / 0.9, -1).sort(descending=True)
    num_kept = min(int((probabilities.cumsum(0) < params.get("top_p", 2.0)).sum()) + 1, params.get("top_k", 12), 12)
    expected = (probabilities[:num_kept] / probabilities[:num_kept].sum() * times).numpy()
    counts = np.bincount(sampled.token_ids, minlength=12)[order[:num_kept].numpy()]
    assert counts.sum() == times
    assert ((counts - expected) ** 2 / expected).sum() < 31.3, "chi-square, 11 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_k_and_top_p_of_equals_take_the_lower_ids(backend: str) -> None:
    logits = torch.zeros(1, 100)
    logits[0, 50:] = -1.0

    def sampled(**params: Any) -> set[int]:
        return set(_sample(backend)(logits, [SamplingRow(range(2000), 1, temperature=50.0, **params)])[0].token_ids)

    assert sampled(top_k=3) == {0, 1, 2}
    assert sampled(top_k=51) == set(range(51))
    assert sampled(top_k=10, top_p=0.5) == set(range(5))
    assert sampled(top_k=10, top_p=0.51) == set(range(6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(backend: str, temperature: float) -> None:
    logits = torch.zeros(1, 70)
    words = np.array([1 << 3, 1 << 31 | 1], np.uint32).view(np.int32)
    row = SamplingRow(range(200), 1, temperature, allowed=words)
    (sampled,) = _sample(backend)(logits, [row])
    assert set(sampled.token_ids) == ({3} if temperature == 0 else {3, 32, 63})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_rows_that_cannot_be_drawn_from_are_named(backend: str, temperature: float, wrong: float) -> None:
    logits = torch.zeros(3, 37)
    logits[1, 36] = wrong
    row = SamplingRow([1], 1, temperature)
    with pytest.raises(UnusableLogits, match="not numbers") as failure:
        _sample(backend)(logits, [row] * 3)
    assert failure.value.rows == (1,)
    barred = SamplingRow([1], 1, temperature, allowed=np.zeros(2, np.int32))
    with pytest.raises(UnusableLogits, match="no token is left") as failure:
        _sample(backend)(torch.zeros(3, 37), [row, row, barred])
    assert failure.value.rows == (2,)
    with pytest.raises(UnusableLogits, match="no token is left") as failure:
        _sample(backend)(torch.full((2, 37), -torch.inf), [row, row])
    assert failure.value.rows == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_rank_equals_alike_and_leave_out_what_cannot_be(backend: str) -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 2.0, 0.0]])
    (sampled,) = _sample(backend)(logits, [SamplingRow([1], 1, 0.0, num_top=5)])
    assert [(entry.token_id, entry.rank) for entry in sampled.top] == [(1, 1), (3, 1), (0, 3), (4, 4)]
    expected = torch.log_softmax(logits[0].double(), -1)
    assert [e.logprob for e in sampled.top] == pytest.approx(expected[[1, 3, 0, 4]].tolist(), abs=1e-12)
    assert sampled.chosen == [sampled.top[0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_outside_the_vocabulary_is_refused(backend: str) -> None:
    changes = LogitChanges(np.array([37]), np.zeros(1), np.zeros(1, np.bool_), np.zeros(1))
    with pytest.raises(IndexError):
        _sample(backend)(torch.zeros(1, 37), [SamplingRow([1], 1, changes=changes)])
