"""What is a Llama of half a billion parameters that anyone can make in seconds? Run as a module: it needs torch.

Its weights are random, so what it says means nothing, but it takes the time that a real one of its shape takes. Each
token is one word, so each token brings text.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

SHAPE_M: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Shape M of the engine's measurements: 507 million parameters."""

_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]


def make(folder: Path) -> None:
    """Write the checkpoint (bf16, safetensors, 1 GB) and its tokenizer; always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**SHAPE_M, dtype="bfloat16")).save_pretrained(folder)
    _save_tokenizer(folder)


def words(count: int) -> list[str]:
    """Return that many different made-up words of three syllables."""
    chance = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chance.choices(_SYLLABLES, k=3))] = None
    return list(found)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = ["<s>", "</s>", *(f"Ġ{word}" for word in words(SHAPE_M["vocab_size"] - 2))]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
