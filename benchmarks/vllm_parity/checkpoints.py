"""Makes small random checkpoints of three families, with the built-in model's tokenizer. Run as a module it makes one.

Weights are large (`initializer_range`), so that every token depends on the whole prompt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.served import ROOT
from tandem_engine.demo import checkpoint_path

WINDOW = 48
"""Tokens of a sliding window: prompts of most requests are longer."""
DEMO = "built-in"
VOCAB_SIZE = 3072
"""That of the built-in model."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
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
MODELS = (DEMO, "llama", "qwen3_moe", "mistral", "gemma3")
"""The built-in model, a random Llama, a mixture of experts, windows in all layers, windows in some layers."""


def made(folder: Path, kind: str) -> Path:
    """Return the checkpoint's folder, below `folder` if it is made; in a process of its own, which imports torch."""
    if kind == DEMO:
        return checkpoint_path()
    target = folder / f"random-{kind}"
    if not target.exists():
        command = [sys.executable, "-m", "benchmarks.vllm_parity.checkpoints", str(target), kind]
        subprocess.run(command, cwd=ROOT, check=True)
    return target


def make(folder: Path, kind: str) -> None:
    """Write the checkpoint in float32; always the same."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: LlamaConfig(**_SHAPE),
        "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS),
        "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
        "gemma3": lambda: Gemma3TextConfig(
            **{**_SHAPE, "num_hidden_layers": 6}, sliding_window=WINDOW, query_pre_attn_scalar=32
        ),
    }
    torch.manual_seed(1)
    auto: Any = AutoModelForCausalLM
    auto.from_config(configs[kind](), dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint_path() / name, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
