"""Of a checkpoint that takes images, the text model is served: by both routes, under every naming of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PaliGemmaConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.registry import find_family
from tandem_engine.models.loader import load_model
from tandem_engine.models.support import check_config
from tandem_engine.models.vision import text_config, text_name
from tandem_engine.settings import EngineConfig
from tests.checkpoints import byte_level_tokenizer
from tests.tandem_engine.models.lean.kinds import _GEMMA3_ROPE, _PHI3, _SHAPE, WINDOW
from tests.tandem_engine.models.published import TOWER
from tests.tandem_engine.models.test_routes import NUM_TOKENS, logits_of, some_tokens

_QWEN_TOWER: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4}
_IDS: dict[str, Any] = {"image_token_index": 300}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
_MROPE = {"rope_type": "default", "rope_theta": 1000.0}


def _qwen_vl(cls: Any, shape: dict[str, Any], section: list[int], tower: dict[str, Any], **values: Any) -> Any:
    text = {**shape, "rope_parameters": {**_MROPE, "mrope_section": section}, **values}
    return cls(text_config=text, vision_config={**_QWEN_TOWER, **tower}, tie_word_embeddings=False, **_QWEN_IDS)


CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(
            **_SHAPE,
            sliding_window=WINDOW,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={kind: dict(rope) for kind, rope in _GEMMA3_ROPE.items()},
        ),
        vision_config=SiglipVisionConfig(**TOWER),
        mm_tokens_per_image=1,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**_SHAPE, sliding_window=None), vision_config=PixtralVisionConfig(**TOWER), **_IDS
    ),
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**_SHAPE),
        vision_config=PixtralVisionConfig(**TOWER),
        tie_word_embeddings=False,
        **_IDS,
    ),
    "qwen2_vl": lambda: _qwen_vl(
        Qwen2VLConfig, _PHI3, [2, 3, 3], {"embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2}
    ),
    "qwen2_5_vl": lambda: _qwen_vl(
        Qwen2_5_VLConfig,
        _PHI3,
        [2, 3, 3],
        {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": lambda: _qwen_vl(
        Qwen3VLConfig,
        _SHAPE,
        [4, 4, 4],
        {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}
INSIDE = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
    "model.": "model.language_model.",
}
"""Beginnings of published names, which transformers also writes, and those of the modules of transformers 5."""


def _made(folder: Path, kind: str) -> Path:
    torch.manual_seed(4)
    model: Any = AutoModelForImageTextToText.from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def _rename(folder: Path, name_of: Callable[[str], str]) -> set[str]:
    """Rename a checkpoint's tensors; return the new names."""
    path = folder / "model.safetensors"
    tensors = {name_of(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return set(tensors)


def _reference(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=token_ids.unsqueeze(0)).logits[0, -1]
    return logits


@pytest.mark.parametrize("route", ["lean", "transformers"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_has_the_logits_of_the_whole_model(kind: str, route: str, tmp_path: Path) -> None:
    folder, token_ids = _made(tmp_path, kind), some_tokens()
    expected = _reference(folder, token_ids)
    for chunks in ([NUM_TOKENS], [17, 40, 12, 1]):
        logits = logits_of(folder, token_ids, chunks, route=route)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("route", ["lean", "transformers"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "qwen3_vl"])
def test_both_namings_of_files_are_known(kind: str, route: str, tmp_path: Path) -> None:
    """Qwen3-VL is published under the names of transformers 5."""
    folder, token_ids = _made(tmp_path, kind), some_tokens()
    expected = logits_of(folder, token_ids, [NUM_TOKENS], route=route)

    def inside(name: str) -> str:
        theirs = next((each for each in INSIDE if name.startswith(each)), "")
        return INSIDE.get(theirs, "") + name.removeprefix(theirs)

    names = _rename(folder, inside)
    assert "model.language_model.embed_tokens.weight" in names
    assert torch.equal(logits_of(folder, token_ids, [NUM_TOKENS], route=route), expected)


def test_the_tower_is_neither_read_nor_counted(tmp_path: Path) -> None:
    folder = _made(tmp_path, "llava")
    stored = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in stored.items() if text_name(name) is not None}
    broken = {name: tensor if name in text else torch.zeros(1) for name, tensor in stored.items()}
    assert 0 < len(text) < len(broken)
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(EngineConfig(str(folder), device="cpu", num_threads=1), lambda *_: None)
    assert loaded.info.num_parameters == sum(tensor.numel() for tensor in text.values())
    assert loaded.info.architecture == "LlamaForCausalLM"


def test_the_head_is_the_stored_one_whatever_the_parts_of_the_configuration_say(tmp_path: Path) -> None:
    """Mistral Small 3.1 stores a head of its own, and its outer configuration's default is a tied one."""
    folder, token_ids = _made(tmp_path, "llava"), some_tokens()
    expected = logits_of(folder, token_ids, [NUM_TOKENS])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert torch.equal(logits_of(folder, token_ids, [NUM_TOKENS]), expected)


def test_a_weight_that_is_missing_is_refused_by_the_compatibility_route_too(tmp_path: Path) -> None:
    folder = _made(tmp_path, "llava")
    _rename(folder, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper_proj"))
    for route in ("lean", "transformers"):
        with pytest.raises(ModelUnusable, match=r"lacks 1 weights, model.layers.1.mlp.up_proj.weight first"):
            load_model(EngineConfig(str(folder), device="cpu", num_threads=1, route=route), lambda *_: None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Llama4Config(), "llama4_text has chunked attention"),
        (PaliGemmaConfig(), r"paligemma takes images \(vision_config\); the text alone is served of gemma3, "),
    ],
)
def test_what_else_takes_images_is_refused_by_name(config: Any, words: str) -> None:
    with pytest.raises(ModelUnusable, match=words):
        check_config(text_config(config, ()))


def test_what_a_text_part_lacks_is_taken_from_the_whole() -> None:
    config = CONFIGS["qwen3_vl"]()
    config.eos_token_id, config.text_config.eos_token_id = [7, 8], None
    text = text_config(config, ["model.language_model.embed_tokens.weight"])
    assert text.eos_token_id == [7, 8] and text.model_type == "qwen3" and find_family(text) is not None
    assert "mrope_section" not in text.rope_parameters and text.rope_parameters["rope_theta"] == 1000.0


def test_a_text_model_is_left_as_it_is() -> None:
    config = AutoConfig.for_model("llama")
    assert text_config(config, ()) is config and text_name("model.layers.0.mlp.up_proj.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )
