"""Do the blocks of transformers' models that run on the op layer say what transformers says?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    ArceeConfig,
    CohereConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tandem_engine.models import known_code
from tandem_engine.models.loader import load_model
from tandem_engine.models.transformers_model import OwnLinear, use_own_linears
from tandem_engine.models.transformers_rotary import StepTables
from tandem_engine.ops.torch_ops import TorchOps
from tandem_engine.settings import EngineConfig
from tests.checkpoints import _SHAPE
from tests.tandem_engine.models.test_routes import NUM_TOKENS, kernels, logits_of, made, reference, some_tokens

_PLAIN = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_MOE: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
_EXPECTED: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True), "+7norms+3mlps+3attentions"),
    "mistral": (lambda: MistralConfig(**_SHAPE, sliding_window=16), "+7norms+3mlps+3attentions"),
    "qwen2": (
        lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "+7norms+3mlps+3attentions",
    ),
    "qwen3": (lambda: Qwen3Config(**_SHAPE), "+13norms+3mlps+3attentions"),
    "qwen2_moe": (lambda: Qwen2MoeConfig(**_PLAIN, **_MOE), "+7norms+3mlps+3attentions"),
    "gemma": (lambda: GemmaConfig(**_SHAPE), "+7norms+3mlps+3attentions"),
    "gemma2": (
        lambda: Gemma2Config(**_SHAPE, sliding_window=16, query_pre_attn_scalar=16),
        "+13norms+3mlps+3attentions",
    ),
    "gemma3": (
        lambda: Gemma3TextConfig(**_SHAPE | {"num_hidden_layers": 6}, sliding_window=16, query_pre_attn_scalar=9),
        "+37norms+6mlps+6attentions",
    ),
    "granite": (
        lambda: GraniteConfig(**_PLAIN, residual_multiplier=0.5, attention_multiplier=0.2),
        "+7norms+3mlps+3attentions",
    ),
    "smollm3": (lambda: SmolLM3Config(**_PLAIN, no_rope_layers=[1, 0, 1]), "+7norms+3mlps+3attentions"),
    "seed_oss": (lambda: SeedOssConfig(**_SHAPE), "+7norms+0mlps+3attentions"),
    "arcee": (lambda: ArceeConfig(**_SHAPE), "+7norms+0mlps+3attentions"),
    "starcoder2": (lambda: Starcoder2Config(**_PLAIN, sliding_window=16), "+0norms+0mlps+3attentions"),
    "glm4": (lambda: Glm4Config(**_SHAPE), "+13norms+3mlps+0attentions"),
    "phi3": (lambda: Phi3Config(**_PLAIN), "+7norms+3mlps+0attentions"),
    "olmo2": (lambda: Olmo2Config(**_PLAIN), "+13norms+3mlps+0attentions"),
    "exaone4": (lambda: Exaone4Config(**_SHAPE, sliding_window=16), "+13norms+3mlps+0attentions"),
    "helium": (lambda: HeliumConfig(**_SHAPE), "+0norms+3mlps+0attentions"),
    "cohere": (lambda: CohereConfig(**_PLAIN), "+0norms+3mlps+0attentions"),
    "gpt_neox": (
        lambda: GPTNeoXConfig(**{key: _SHAPE[key] for key in _SHAPE if "head" not in key}, num_attention_heads=4),
        "+0norms+0mlps+0attentions",
    ),
    "odd sizes": (
        lambda: LlamaConfig(**_SHAPE | {"head_dim": 12, "intermediate_size": 100}),
        "+7norms+0mlps+0attentions",
    ),
}


def _composition(folder: Path, kernels: str) -> str:
    config = EngineConfig(str(folder), device="cpu", num_threads=1, route="transformers", kernels=kernels)  # type: ignore[arg-type]
    route = load_model(config, lambda *_: None).info.numerics_class.rpartition("/")[2]
    return route[route.index("+") :]


@kernels
@pytest.mark.parametrize("kind", list(_EXPECTED))
def test_blocks_say_what_transformers_says(kind: str, kernels: str, tmp_path: Path) -> None:
    config, expected_composition = _EXPECTED[kind]
    folder, token_ids = made(tmp_path, config()), some_tokens()
    if kernels == "torch" and kind == "odd sizes":  # which can cut anywhere
        expected_composition = "+7norms+3mlps+3attentions"
    assert _composition(folder, kernels) == expected_composition
    expected = reference(folder, token_ids)
    whole = logits_of(folder, token_ids, [NUM_TOKENS], route="transformers", kernels=kernels)
    assert (whole - expected).abs().max() <= 1e-4 * expected.abs().max()
    in_parts = logits_of(folder, token_ids, [17, 40, 12, 1], route="transformers", kernels=kernels)
    assert (in_parts - expected).abs().max() <= 1e-4 * expected.abs().max()
    if expected_composition.endswith("+3attentions"):
        assert torch.equal(whole, in_parts)


def test_without_sources_all_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(_: object) -> str:
        raise OSError("could not get source code")

    known_code.digest_of.cache_clear()
    monkeypatch.setattr("tandem_engine.models.known_code.inspect.getsource", none)
    folder, token_ids = made(tmp_path, LlamaConfig(**_SHAPE)), some_tokens()
    assert _composition(folder, "torch") == "+0norms+0mlps+0attentions"
    logits = logits_of(folder, token_ids, [NUM_TOKENS], route="transformers", kernels="torch")
    known_code.digest_of.cache_clear()
    expected = reference(folder, token_ids)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class _Told(nn.Module):
    def forward(self, x: Any) -> Any:
        """Return one more."""
        return x + 1  # one


class _Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


def test_code_is_known_by_what_it_does_and_by_nothing_else() -> None:
    digest = known_code.digest_of_method(_Plain(), "forward")
    assert digest and digest == known_code.digest_of_method(_Told(), "forward")
    assert digest != known_code.digest_of_method(_Other(), "forward")
    assert known_code.digest_of_method(_Plain(), "not_there") == ""
    doubled = functools.wraps(_Plain.forward)(lambda self, x: 2 * _Plain.forward(self, x))
    assert known_code.digest_of(doubled) == ""
    changed: Any = _Plain()
    changed.forward = lambda x: x
    assert known_code.digest_of_method(changed, "forward") == ""


def test_siblings_lie_in_one_weight_and_are_the_same_layers() -> None:
    torch.manual_seed(3)
    model: Any = nn.Module()
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    model.q_proj, model.k_proj, model.v_proj = nn.Linear(8, 6), nn.Linear(8, 4, bias=False), nn.Linear(8, 5)
    x = torch.randn(3, 8)
    expected = [linear(x) for linear in (model.q_proj, model.k_proj, model.v_proj)]
    with torch.no_grad():
        use_own_linears(model.requires_grad_(False), TorchOps())
    linears = [model.q_proj, model.k_proj, model.v_proj]
    whole = linears[0].whole
    memory = whole.tensors["weight"].data_ptr()
    for linear, rows in zip(linears, expected, strict=True):
        assert type(linear) is OwnLinear and linear.whole is whole
        assert linear.own.tensors["weight"].untyped_storage().data_ptr() == memory
        torch.testing.assert_close(linear(x), rows)


def test_embeddings_that_are_not_by_halves_are_left_to_transformers() -> None:
    ops = TorchOps()
    step = ops.step(torch.arange(5), torch.arange(5), [])
    table = torch.randn(1, 5, 4)
    halves, pairs = torch.cat([table, table], -1), table.repeat_interleave(2, -1)
    turned = StepTables(ops).of_step()
    assert turned(step, pairs, halves) is None
    assert turned(step, halves.double(), halves.double()) is None
    found = turned(step, halves, halves)
    assert found is not None and torch.equal(found.rotary.cos[:5], table[0])
    assert torch.equal(found.step.positions, torch.arange(5)) and found.step.slots is step.slots


def test_two_embeddings_of_a_step_have_a_table_each_and_the_next_step_takes_them_over() -> None:
    ops = TorchOps()
    tables = StepTables(ops)
    for size in (3, 2, 40):
        step = ops.step(torch.arange(size), torch.arange(size), [])
        one, two = torch.randn(1, size, 8).repeat(1, 1, 2), torch.randn(1, size, 2).repeat(1, 1, 2)
        turned = tables.of_step()
        first, second, again = turned(step, one, one), turned(step, two, two), turned(step, one, one)
        assert first is not None and second is not None and again is not None
        assert again.rotary is first.rotary and again.step is first.step is second.step
        assert torch.equal(first.rotary.cos[:size], one[0, :, :8]) and torch.equal(
            second.rotary.sin[:size], two[0, :, :2]
        )
