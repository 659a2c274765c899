"""Do all layers of a known decoder of transformers run as one op, with the bits of one block after the other?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaModel

from tandem_engine.ops.cpu.layers import CpuLayers
from tests.checkpoints import _SHAPE
from tests.tandem_engine.models.test_routes import NUM_TOKENS, has_compiler, logits_of, made, reference, some_tokens

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
_PLAIN = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_KNOWN: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama of far contexts": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=16),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2 of two windows": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "smollm3": lambda: SmolLM3Config(**_PLAIN, no_rope_layers=[1, 0, 1]),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all layers at once: how many tokens each had."""
    seen: list[int] = []
    forward = CpuLayers.forward

    def counted(layers: CpuLayers, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(x))
        return forward(layers, x, *rest)

    monkeypatch.setattr(CpuLayers, "forward", counted)
    return seen


def answers(folder: Path) -> list[torch.Tensor]:
    """Return the last token's logits, whole and in chunks, the longest of which comes last."""
    sizes = [[NUM_TOKENS], [1, 17, NUM_TOKENS - 18]]
    return [logits_of(folder, some_tokens(), each, route="transformers", kernels="cpp") for each in sizes]


@pytest.mark.parametrize("kind", _KNOWN)
def test_all_layers_at_once_give_the_bits_of_one_after_the_other(
    kind: str, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, _KNOWN[kind]())
    at_once = answers(folder)
    assert calls == [NUM_TOKENS, 1, 17, NUM_TOKENS - 18]
    monkeypatch.setattr("tandem_engine.models.transformers_blocks.run_layers_at_once", lambda *_: None)
    one_by_one = answers(folder)
    assert len(calls) == 4
    assert all(map(torch.equal, at_once, one_by_one))
    expected = reference(folder, some_tokens())
    assert (at_once[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "config",
    [
        lambda: GemmaConfig(**_SHAPE),
        lambda: LlamaConfig(**_SHAPE | {"head_dim": 12, "intermediate_size": 100}),
    ],
    ids=["another decoder", "blocks that are not ours"],
)
def test_other_models_run_as_they_are(config: Callable[[], Any], tmp_path: Path, calls: list[int]) -> None:
    folder = made(tmp_path, config())
    whole, _ = answers(folder)
    assert not calls
    expected = reference(folder, some_tokens())
    assert (whole - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_decoder_that_somebody_wrapped_runs_as_it_is(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Any = LlamaModel.forward

    @functools.wraps(forward)
    def patched(*arguments: Any, **kwargs: Any) -> Any:
        return forward(*arguments, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", patched)
    answers(made(tmp_path, _KNOWN["llama"]()))
    assert not calls
