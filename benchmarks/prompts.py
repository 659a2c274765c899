"""Which prompts have exactly so many tokens, and no beginning in common?

A prompt is a run of random words that are one token each, so every tokenizer of the usual kinds gives one token per
word, and no prefix cache finds anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

_WORD_MARKS = ("Ġ", "\u2581")
"""How byte-level BPE and SentencePiece write the space before a word."""


def prompts(model_folder: Path, num_tokens: int, seed: int = 1) -> Iterator[str]:
    """Yield prompts without end, always the same for a seed."""
    words = _words(model_folder)
    chance = random.Random(seed)
    while True:
        yield "".join(f" {word}" for word in chance.choices(words, k=num_tokens))


def _words(model_folder: Path) -> list[str]:
    vocabulary = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [entry[0] if isinstance(entry, list) else entry for entry in vocabulary]  # Unigram has [token, score]
    words = [token[1:] for token in tokens if token.startswith(_WORD_MARKS)]
    plain = sorted(word for word in words if len(word) > 2 and word.isascii() and word.isalpha() and word.islower())
    if len(plain) < 100:
        raise ValueError(f"{model_folder} has {len(plain)} words of one token, too few to make prompts from")
    return plain
