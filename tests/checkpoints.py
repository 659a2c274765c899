"""Makes the small random models that tests and benchmarks run: tiny ones for our engine, wider ones for vLLM too.

`python -m tests.checkpoints FOLDER KIND` makes a wide one, for a process that does not import torch itself.
"""

from __future__ import annotations

import shutil
import sys
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
    Qwen3MoeConfig,
)
from transformers.utils import logging

from tandem_engine.demo import checkpoint_path
from tests.quantised import quantise

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

WIDE_WINDOW = 48
"""Tokens of a sliding window of the wide models: prompts of most requests are longer."""
_WIDE_SHAPE: dict[str, Any] = {
    "vocab_size": 3072,  # that of the built-in model, whose tokenizer they have
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # large: every token depends on the whole prompt
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
}
WIDE_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_WIDE_SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_WIDE_SHAPE, **_EXPERTS),
    "mistral": lambda: MistralConfig(**_WIDE_SHAPE, sliding_window=WIDE_WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **_WIDE_SHAPE | {"num_hidden_layers": 6}, sliding_window=WIDE_WINDOW, query_pre_attn_scalar=32
    ),
}
"""A llama, a mixture of experts, windows in all layers, windows in five of six layers."""
QUANTISED = "llama-int8"
"""The wide llama with weights of 8 bits."""


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


def make_wide_checkpoint(folder: Path, kind: str) -> Path:
    """Return the folder of a random model whose heads vLLM's attention on CPUs takes, with the built-in tokenizer.

    Made below `folder` if it is missing; the weights, in float32, are always the same.
    """
    target = folder / f"random-{kind}"
    if target.exists():
        return target
    if kind == QUANTISED:
        return quantise(make_wide_checkpoint(folder, "llama"), target)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(WIDE_CONFIGS[kind](), dtype=torch.float32).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint_path() / name, target / name)
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


if __name__ == "__main__":
    logging.disable_progress_bar()
    make_wide_checkpoint(Path(sys.argv[1]), sys.argv[2])
