"""Provides the small real models that the engine's tests run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_engine.assembly import AssembledEngine, assemble
from tandem_engine.core import EngineCore
from tandem_engine.messages import AddRequest, Refused, RequestOutput
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig
from tests import checkpoints

MakeCheckpoint = Callable[[str], Path]
MakeEngine = Callable[..., AssembledEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return the folder of a small random model of that kind, with a tokenizer; made once per session."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: checkpoints.make_checkpoint(folder, kind)


@pytest.fixture(scope="session")
def make_engine(make_checkpoint: MakeCheckpoint) -> MakeEngine:
    """Assemble an engine in this process; keywords are EngineConfig's."""

    def make(kind: str, **settings: Any) -> AssembledEngine:
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 128, "num_threads": 1} | settings
        config = EngineConfig(model=str(make_checkpoint(kind)), device="cpu", dtype="float32", **values)
        return assemble(config, lambda stage, fraction: None)

    return make


@pytest.fixture(scope="session")
def drain() -> Callable[[EngineCore], list[RequestOutput]]:
    """Step until there is no work, and return every output."""

    def run(core: EngineCore) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while core.has_work():
            outputs += core.step().outputs
        return outputs

    return run


Generate = Callable[[EngineCore, Iterable[tuple[Sequence[int], SamplingParams]]], list[list[int]]]


@pytest.fixture(scope="session")
def generate(drain: Callable[[EngineCore], list[RequestOutput]]) -> Generate:
    """Run requests side by side and return the answer of each."""

    def run(core: EngineCore, asks: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for index, (prompt, sampling) in enumerate(asks):
            answers[str(index)] = []
            answer = core.handle(AddRequest(str(index), list(prompt), len(prompt), sampling))
            assert not any(isinstance(event, Refused) for event in answer), answer
        for output in drain(core):
            answers[output.request_id] += output.token_ids
        return list(answers.values())

    return run
