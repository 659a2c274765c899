"""Both routes and both op layers give the logits of transformers, and each refuses what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    HeliumConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    Starcoder2Config,
)

from tandem_engine.assembly import assemble
from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.models.loader import load_model
from tandem_engine.models.placement import numerics_class
from tandem_engine.models.transformers_model import ROUTE_NAME
from tandem_engine.ops.base import Run
from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tandem_engine.ops.sdpa_ops import SdpaOps
from tandem_engine.ops.torch_ops import TorchOps
from tandem_engine.scheduling.numerics import BATCH_DEPENDENT
from tandem_engine.settings import EngineConfig, Route
from tests.checkpoints import _SHAPE, byte_level_tokenizer
from tests.tandem_engine.steps import step_of

NUM_TOKENS = 70
_GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 320,
    "initializer_range": 0.2,
}
_PLAIN = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
_MIXTURE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "hidden_act": "gelu"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "olmo": lambda: OlmoConfig(**{**_PLAIN, "tie_word_embeddings": True}),  # no weights but those of linear layers
    "olmo3": lambda: Olmo3Config(**_PLAIN, sliding_window=16),
    "glm4": lambda: Glm4Config(**_SHAPE),
    "helium": lambda: HeliumConfig(**_SHAPE),
    "arcee": lambda: ArceeConfig(**_SHAPE),
    "seed_oss": lambda: SeedOssConfig(**_SHAPE),
    "exaone4": lambda: Exaone4Config(**_SHAPE, sliding_window=16),
    "gemma": lambda: GemmaConfig(**_SHAPE),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{key: value for key, value in _SHAPE.items() if "head" not in key}, num_attention_heads=4
    ),
    "olmoe": lambda: OlmoeConfig(**_PLAIN, num_experts=6, num_experts_per_tok=3),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_PLAIN, **_MIXTURE, shared_expert_intermediate_size=32, num_experts=5),
    "starcoder2": lambda: Starcoder2Config(**_PLAIN, sliding_window=16),
    "phi": lambda: PhiConfig(**_PLAIN),
    "cohere": lambda: CohereConfig(**{**_PLAIN, "tie_word_embeddings": True}),
    "gpt2": lambda: GPT2Config(**_GPT2, bos_token_id=0, eos_token_id=1),
}


def has_compiler() -> bool:
    try:
        load_cpu_ops()
    except KernelsUnavailable:
        return False
    return True


kernels = pytest.mark.parametrize(
    "kernels",
    [pytest.param("cpp", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")), "torch"],
)


def made(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def logits_of(folder: Path, token_ids: torch.Tensor, chunks: list[int], **settings: Any) -> torch.Tensor:
    """Return the last token's logits, computed in chunks of these sizes."""
    loaded = load_model(EngineConfig(str(folder), device="cpu", num_threads=1, **settings), lambda *_: None)
    geometry = replace(loaded.geometry, groups=())  # one group for all layers, whatever their windows
    cache = PagedKVCache(geometry, 16, torch.device("cpu"))
    blocks = torch.tensor([3, 9, 1, 14, 5])
    logits, start = torch.empty(0), 0
    with torch.inference_mode():
        for size in chunks:
            positions = torch.arange(start, start + size)
            slots = blocks[positions // 16] * 16 + positions % 16
            needed = blocks[: -(-(start + size) // 16)]
            step = step_of(loaded.ops, positions, slots, [Run(0, start, size, needed)])
            logits = loaded.model.forward(token_ids[positions], step, cache.pool, torch.tensor([size - 1]))[0]
            start += size
    return logits


def reference(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids.unsqueeze(0)).logits[0, -1]
    return logits


def some_tokens() -> torch.Tensor:
    return torch.randint(2, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(8))


@kernels
@pytest.mark.parametrize("kind", CONFIGS)
def test_families_without_code_of_ours_are_served_by_way_of_transformers(
    kind: str, kernels: str, tmp_path: Path
) -> None:
    folder, token_ids = made(tmp_path, CONFIGS[kind]()), some_tokens()
    expected = reference(folder, token_ids)
    whole = logits_of(folder, token_ids, [NUM_TOKENS], kernels=kernels)
    assert (whole - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert whole.argmax() == expected.argmax()
    in_parts = logits_of(folder, token_ids, [17, 40, 12, 1], kernels=kernels)
    assert (in_parts - expected).abs().max() <= 1e-4 * expected.abs().max()


@kernels
@pytest.mark.parametrize("kind", ["olmoe", "mixtral", "qwen3_moe", "ernie4_5_moe", "minimax_m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_are_served_by_way_of_transformers(
    kind: str, dtype: torch.dtype, kernels: str, tmp_path: Path
) -> None:
    mixtures = {
        "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
        "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48),
        "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(**_PLAIN, moe_num_experts=5, moe_k=2, moe_intermediate_size=48),
        "minimax_m2": lambda: MiniMaxM2Config(**_SHAPE, num_local_experts=5, num_experts_per_tok=2),
    }
    folder, token_ids = made(tmp_path, (CONFIGS | mixtures)[kind](), dtype), some_tokens()
    expected = reference(folder, token_ids)
    for chunks in ([NUM_TOKENS], [3, 33, 33, 1]):
        logits = logits_of(folder, token_ids, chunks, route="transformers", kernels=kernels)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_classes_name_the_vectors_of_torch_where_torch_computes(tmp_path: Path) -> None:
    """Its exp differs between AVX2 and AVX-512, so the shares of a mixture's experts do."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    mixture = MixtralConfig(**_SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    classes = {}
    for name, config, route in (
        ("mixture", mixture, "lean"),
        ("plain", LlamaConfig(**_SHAPE), "lean"),
        ("compatibility", LlamaConfig(**_SHAPE), "transformers"),
    ):
        (tmp_path / name).mkdir()
        values: dict[str, Any] = {"route": route, "num_threads": 1, "num_kv_blocks": 8, "device": "cpu"}
        loaded = load_model(EngineConfig(str(made(tmp_path / name, config)), **values), lambda *_: None)
        classes[name] = loaded.info.numerics_class.split("/")[1]
    assert classes == {"mixture": f"cpu-{capability}", "plain": "cpu", "compatibility": f"cpu-{capability}"}


@kernels
def test_the_compatibility_route_is_batch_dependent_and_speculates_on_nothing(kernels: Any, tmp_path: Path) -> None:
    folder = made(tmp_path, LlamaConfig(**_SHAPE))
    for route in ("lean", "transformers"):
        config = EngineConfig(str(folder), device="cpu", num_threads=1, route=route, kernels=kernels, num_kv_blocks=8)
        loaded = load_model(config, lambda *_: None)
        is_lean = route == "lean"
        assert ("batch-dependent" not in loaded.info.numerics_class) is is_lean
        assert loaded.is_batch_invariant is is_lean
        scheduler = assemble(config, lambda *_: None).core.scheduler
        assert bool(scheduler.config.max_draft_tokens) is is_lean


@kernels
@pytest.mark.parametrize("route", ["lean", "transformers"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_bf16_checkpoint_stays_bf16_and_is_computed_as_if_it_were_widened(
    route: str, kernels: str, tied: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(**{**_SHAPE, "tie_word_embeddings": tied})
    folder, token_ids = made(tmp_path, config, torch.bfloat16), some_tokens()
    narrow = logits_of(folder, token_ids, [60, 10], route=route, kernels=kernels)
    wide = logits_of(folder, token_ids, [60, 10], route=route, kernels=kernels, dtype="float32")
    assert torch.equal(narrow, wide)
    expected = reference(folder, token_ids)
    assert (narrow - expected).abs().max() <= 1e-4 * expected.abs().max()


@kernels
def test_the_routes_agree_and_are_told_apart(kernels: Any, tmp_path: Path) -> None:
    folder, token_ids = made(tmp_path, LlamaConfig(**_SHAPE)), some_tokens()
    lean, other = (
        logits_of(folder, token_ids, [NUM_TOKENS], route=route, kernels=kernels) for route in ("lean", "transformers")
    )
    assert (lean - other).abs().max() <= 1e-4 * other.abs().max()
    routes: tuple[Route, ...] = ("auto", "lean", "transformers")
    classes = {
        load_model(
            EngineConfig(str(folder), device="cpu", route=route, kernels=kernels), lambda *_: None
        ).info.numerics_class
        for route in routes
    }
    assert len(classes) == 2


def test_a_checkpoint_of_mixed_dtypes_goes_by_way_of_transformers(tmp_path: Path) -> None:
    folder, token_ids = made(tmp_path, LlamaConfig(**_SHAPE)), some_tokens()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, folder / "model.safetensors", metadata={"format": "pt"})
    expected = reference(folder, token_ids)
    logits = logits_of(folder, token_ids, [NUM_TOKENS], kernels="torch")
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises(ModelUnusable, match="in different dtypes"):
        load_model(EngineConfig(str(folder), device="cpu", route="lean"), lambda *_: None)


def test_a_window_that_only_masks_know_of_is_refused(tmp_path: Path) -> None:
    config = PhimoeConfig(**_SHAPE, num_local_experts=4, sliding_window=16)
    with pytest.raises(ModelUnusable, match="tells masks, but not attention, of its window of 16 tokens"):
        logits_of(made(tmp_path, config), some_tokens(), [NUM_TOKENS])


def test_what_a_route_cannot_do_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = made(tmp_path, CONFIGS["olmo"]())
    with pytest.raises(ModelUnusable, match=r"the lean route serves .*llama.*, not olmo; take auto"):
        load_model(EngineConfig(str(folder), device="cpu", route="lean"), lambda *_: None)
    with pytest.raises(ModelUnusable, match=r"the C\+\+ kernels compute in float32.*take --kernels auto"):
        load_model(EngineConfig(str(folder), device="cpu", dtype="bfloat16", kernels="cpp"), lambda *_: None)


def test_without_a_compiler_torch_serves_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> object:
        raise KernelsUnavailable("no C++ compiler found; install one, such as g++")

    monkeypatch.setattr("tandem_engine.ops.choice.load_cpu_ops", none)
    folder = made(tmp_path, LlamaConfig(**_SHAPE))
    reports: list[str] = []
    engine = assemble(EngineConfig(str(folder), device="cpu", num_kv_blocks=8), lambda what, _: reports.append(what))
    assert any("several times faster: no C++ compiler found" in line for line in reports)
    assert "torch" in engine.ready.model.numerics_class.split("/")[2]
    with pytest.raises(ModelUnusable, match="take --kernels auto"):
        load_model(EngineConfig(str(folder), device="cpu", kernels="cpp"), lambda *_: None)


def test_an_arm_machine_is_of_another_class_than_an_x86_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cosines round otherwise there, although the kernels give the same bits (tests of kernel bits)."""
    ops, device = TorchOps(torch.device("cpu")), torch.device("cpu")
    names = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        names.append(numerics_class(ops, "lean", device, torch.float32, "llama", with_capability=False).split("/")[1])
    assert names == ["cpu", "cpu-aarch64"]


def test_a_card_is_in_the_name_of_its_class_and_no_class_of_cards_promises_equal_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two cards of one capability have other numbers of multiprocessors, and so other kernels."""
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    names = []
    for card in ("NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, card=card: card)
        for route in ("lean", ROUTE_NAME):
            name = numerics_class(SdpaOps(cuda), route, cuda, torch.bfloat16, "llama", with_capability=True)
            assert name.count(BATCH_DEPENDENT) == 1
            names.append(name.split("/")[1])
    assert names[::2] == ["cuda-sm90-h100-pcie", "cuda-sm90-h200", "cuda-sm90-h200-mig-1g-18gb"]
