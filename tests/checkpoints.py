"""Makes the small models that the tests run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tandem_engine.demo import checkpoint_path

VOCAB_SIZE = 320
WINDOW = 16
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**_SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "olmo2": lambda: Olmo2Config(**{key: value for key, value in _SHAPE.items() if key != "head_dim"}),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE | {"num_hidden_layers": 6}, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
}


def make_checkpoint(folder: Path, kind: str) -> Path:
    """Return the folder of a small random model of that kind, with a tokenizer; "demo" is the built-in one.

    Made below `folder` if it is missing; the weights are always the same.
    """
    if kind == "demo":
        return checkpoint_path()
    target = folder / f"tiny-{kind}"
    if not target.exists():
        _save(CONFIGS[kind](), target)
    return target


def make_deep_checkpoint(folder: Path, num_layers: int) -> Path:
    """Return the folder of a small random model whose tokens have much KV for its size: 256 bytes per layer."""
    target = folder / "deep-llama"
    _save(LlamaConfig(**_SHAPE | {"num_hidden_layers": num_layers}), target)
    return target


def make_long_checkpoint(folder: Path, context_length: int) -> Path:
    """Return the folder of the small Llama with a context of that many tokens: 768 bytes of KV per token."""
    target = folder / "long-llama"
    _save(LlamaConfig(**_SHAPE | {"max_position_embeddings": context_length}), target)
    return target


def _save(config: Any, target: Path) -> None:
    torch.manual_seed(9)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    byte_level_tokenizer().save_pretrained(target)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of VOCAB_SIZE entries, trained on one sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
