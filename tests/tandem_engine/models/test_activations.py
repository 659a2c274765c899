"""Are the compatibility route's activations row-wise, and does it know where they are not?"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from tandem_engine.assembly import assemble
from tandem_engine.models.transformers_model import use_own_activations
from tandem_engine.settings import EngineConfig


@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh"])
def test_a_rows_activation_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    model = nn.Sequential(nn.Identity(), ACT2FN[name])
    x = torch.randn(9, 4864, generator=torch.Generator().manual_seed(1))
    before = model(x)
    assert use_own_activations(model)
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    for width in (100, 1000, 4864):
        rows = x[:, :width].contiguous()
        assert torch.equal(model(rows), torch.cat([model(row[None]) for row in rows]))


@pytest.mark.parametrize(
    ("name", "is_rowwise"), [("relu", True), ("relu2", True), ("gelu", False), ("gelu_new", False)]
)
def test_others_are_left_and_counted_as_what_they_are(name: str, is_rowwise: bool) -> None:
    activation: Any = ACT2FN[name]
    model = nn.Sequential(activation)
    assert use_own_activations(model) is is_rowwise
    assert model[0] is activation


def test_a_model_with_an_activation_of_torchs_guesses_nothing(
    make_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for name, guesses in (("silu", True), ("gelu", False)):
        folder = shutil.copytree(make_checkpoint("llama"), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": name}))
        engine = assemble(
            EngineConfig(str(folder), device="cpu", route="transformers", num_kv_blocks=8, num_threads=1),
            lambda stage, fraction: None,
        )
        assert bool(engine.core.scheduler.config.max_draft_tokens) is guesses
