"""Shares checkpoints, made once, and every backend of this machine among the decoder's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.load import LeanRequest, load_decoder
from tandem_engine.models.lean.registry import find_family
from tandem_engine.ops.base import Ops
from tandem_engine.ops.torch_ops import TorchOps
from tests.tandem_engine.models.lean.kinds import NUM_POSITIONS, make_checkpoint

MakeKind = Callable[..., Path]
LoadFolder = Callable[..., Decoder]


@pytest.fixture(scope="session")
def make_kind(tmp_path_factory: pytest.TempPathFactory) -> MakeKind:
    """Return the folder of a small checkpoint of that kind; made once per session."""
    folder = tmp_path_factory.mktemp("kinds")
    return lambda kind, *args, **saving: make_checkpoint(folder, kind, *args, **saving)


@pytest.fixture(scope="session", params=["torch", "cpu"])
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ops:
    """Each backend in turn; a backend that cannot run here skips its tests with the reason."""
    if request.param == "torch":
        return TorchOps()
    from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops

    try:
        return load_cpu_ops(tmp_path_factory.mktemp("kernels"))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def load_folder() -> LoadFolder:
    """Load a checkpoint; keywords are LeanRequest's."""

    def load(folder: Path, ops: Ops, **values: object) -> Decoder:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        family = find_family(config)
        assert family is not None, f"{config.model_type} has no family"
        request = LeanRequest(folder, config, family, **{"num_positions": NUM_POSITIONS} | values)  # type: ignore[arg-type]
        return load_decoder(request, ops, lambda sentence: None)

    return load


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
