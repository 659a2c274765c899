"""Makes Llamas of a given size with random weights, in seconds. Run as a module with a folder and a shape.

Their weights are random, so their answers mean nothing, but their speed is that of a real model of the shape.
Each token is one word, so each token brings text.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.served import ROOT

_ALL_SHAPES: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPE_M: dict[str, Any] = {
    **_ALL_SHAPES,
    "vocab_size": 32_000,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Shape M of the engine's measurements: 507 million parameters."""

SHAPE_QWEN: dict[str, Any] = {
    **_ALL_SHAPES,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""494 million parameters, in the shape of Qwen2.5 0.5B, whose vocabulary is large for its size."""

SHAPE_S: dict[str, Any] = {
    **_ALL_SHAPES,
    "vocab_size": 32_000,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 14,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""103 million parameters."""

SHAPE_L: dict[str, Any] = {
    **_ALL_SHAPES,
    "tie_word_embeddings": True,
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""1.24 billion parameters, in the shape of Llama 3.2 1B: 2.5 GB, and 32 KiB of KV per token in bfloat16."""

TINY: dict[str, Any] = {
    **_ALL_SHAPES,
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""A third of a million parameters: as good as no work. A block of 8 tokens takes one page of a store, 4 KiB."""

LONG: dict[str, Any] = {
    **_ALL_SHAPES,
    "max_position_embeddings": (128 << 10) + 1024,
    "initializer_range": 0.2,
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""17 million parameters and 1 KiB of KV per token; each token depends on the prompt, because the weights are large."""

FAR: dict[str, Any] = {
    **_ALL_SHAPES,
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""59 million parameters and 16 KiB of KV per token in float32: a core computes for longer than the link takes.

With a third of the parameters no hand-over of up to 7,000 tokens was sooner on a quick core.
"""

SHAPES = {"1b": SHAPE_L, "0.5b": SHAPE_M, "qwen": SHAPE_QWEN, "0.1b": SHAPE_S, "tiny": TINY, "long": LONG, "far": FAR}

_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]


def made(folder: Path, shape: str) -> Path:
    """Return the checkpoint of that shape below `folder`, made where it is not there yet.

    In a process of its own: torch's threads have no place in one that measures.
    """
    target = folder / f"random-llama-{shape}"
    if not target.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.lib.random_model", str(target), shape], cwd=ROOT, check=True)
    return target


def make(folder: Path, shape: str) -> None:
    """Write the checkpoint (bf16, safetensors) and its tokenizer; always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], dtype="bfloat16")).save_pretrained(folder)
    _save_tokenizer(folder, SHAPES[shape]["vocab_size"])


def words(count: int) -> list[str]:
    """Return that many different made-up words of three syllables."""
    chance = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chance.choices(_SYLLABLES, k=3))] = None
    return list(found)


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = ["<s>", "</s>", *(f"Ġ{word}" for word in words(vocab_size - 2))]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
