"""Tests that a request gets the same bits whichever way it is answered, and that a difference would be noticed.

This is the short form of `make determinism`. Each run draws a new seed and prints it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_engine.execution.grammar.compiled import CompiledGrammars
from tandem_engine.execution.model import Model, ignore
from tandem_engine.models.loader import LoadedModel
from tandem_engine.ops.base import KVPool, Step
from tests.tandem_engine.determinism.recording import Journal
from tests.tandem_engine.determinism.request_specs import random_specs
from tests.tandem_engine.determinism.stage import LEFT_OUT, MODELS, Stage, loaded
from tests.tandem_engine.determinism.verdict import Line, compare_all, judge, table, totals
from tests.tandem_engine.determinism.ways import Way, alone, in_batches, in_chunks, preempted

_MODELS = ("demo", "qwen2", "mistral", "gemma2")
_NUM_REQUESTS = 48


@pytest.mark.timeout(300)
def test_a_token_depends_on_its_request_alone(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    lines = totals(judge(_MODELS, _NUM_REQUESTS, seed, tmp_path, lambda line: None))
    report = "\n".join([f"seed {seed}", *table(lines)])
    print(report)
    assert all(line.holds for line in lines), report


class _Spoiled:
    """A model whose logits, or whose keys, differ by one rounding in steps for which `is_spoiled` returns True."""

    def __init__(self, model: Model, is_spoiled: Callable[[Step], bool], part: str) -> None:
        self._model = model
        self._is_spoiled = is_spoiled
        self._part = part

    @property
    def is_batch_invariant(self) -> bool:
        return self._model.is_batch_invariant

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        logits = self._model.forward(token_ids, step, pool, sample_rows, kv_written)
        if self._is_spoiled(step):
            if self._part == "keys":
                block = step.runs[0].blocks[0]
                pool.rows[block] = torch.nextafter(pool.rows[block], torch.tensor(torch.inf))
            else:
                logits[0, 5] = torch.nextafter(logits[0, 5], torch.tensor(torch.inf))
        return logits


def _spoiled(folder: Path, is_spoiled: Callable[[Step], bool], part: str) -> LoadedModel:
    model = loaded("llama", folder)
    return replace(model, model=_Spoiled(model.model, is_spoiled, part))


def _lines(model: LoadedModel, way: Way) -> list[Line]:
    return list(compare_all(model, 8, 5, [way]))


def test_one_rounding_of_one_logit_is_noticed(tmp_path: Path) -> None:
    model = _spoiled(tmp_path, lambda step: len(step.runs) > 1, "logits")
    same, batched = _lines(model, Way("in batches", in_batches, "shared_steps"))
    assert same.holds, same.differences
    assert not batched.holds and any("other logits" in each for each in batched.differences)


def test_keys_that_depend_on_a_prompts_chunks_are_noticed(tmp_path: Path) -> None:
    model = _spoiled(tmp_path, lambda step: step.runs[0].num_tokens > 1 and step.runs[0].start > 0, "keys")
    same, chunked = _lines(model, Way("in chunks", in_chunks, "chunks"))
    assert same.holds, same.differences
    assert not chunked.holds


def test_a_way_that_no_request_went_proves_nothing(tmp_path: Path) -> None:
    _, line = _lines(loaded("llama", tmp_path), Way("preempted", alone, "preemptions"))
    assert not line.differences and not line.holds


def test_the_steps_of_a_way_do_not_depend_on_the_time_that_a_grammar_takes_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load the compiler's thread got no core: requests waited for it and were not preempted."""
    model = loaded("llama", tmp_path)
    specs = random_specs(random.Random(3), 24, model.info.vocab_size, model.info.context_length)
    assert any(spec.sampling.grammar for spec in specs)

    def counters() -> dict[str, int]:
        journal = Journal(frozenset(spec.request_id for spec in specs))
        preempted(Stage(model, random.Random(3), journal), specs)
        assert not journal.conflicts
        return {name: count for name, count in journal.counters.items() if not name.endswith("_seconds")}

    quick = counters()
    monkeypatch.setattr(CompiledGrammars, "is_ready", lambda self, grammar: False)  # the thread never comes to it
    assert counters() == quick and quick["requests_preempted"] > 0


def test_batch_dependent_models_are_left_out_by_name(tmp_path: Path) -> None:
    assert not LEFT_OUT.keys() & MODELS.keys()
    assert not any(loaded(name, tmp_path / name).model.is_batch_invariant for name in LEFT_OUT)
