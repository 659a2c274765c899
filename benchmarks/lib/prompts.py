"""Makes prompts of an exact number of tokens that share no prefix.

A prompt is a run of random words that are one token each, the space before them included, or (the built-in model) two:
the space stands alone there. No prefix cache finds anything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

_WORD_MARKS = ("Ġ", "\u2581")
"""How byte-level BPE and SentencePiece write the space before a word."""
_MIN_WORDS = 100


def prompts(model_folder: Path, num_tokens: int, seed: int = 1) -> Iterator[str]:
    """Yield prompts without end, always the same for a seed."""
    tokens = _tokens(model_folder)
    with_space = _plain(token[1:] for token in tokens if token.startswith(_WORD_MARKS))
    chance = random.Random(seed)
    if len(with_space) >= _MIN_WORDS:
        while True:
            yield "".join(f" {word}" for word in chance.choices(with_space, k=num_tokens))
    alone = [word for word in _plain(tokens) if word not in with_space]
    if len(alone) < _MIN_WORDS:
        raise ValueError(f"{model_folder} has {len(alone)} words of one token, too few to make prompts from")
    while True:
        text = "".join(f" {word}" for word in chance.choices(alone, k=-(-num_tokens // 2)))
        yield text[num_tokens % 2 :]


def _tokens(model_folder: Path) -> list[str]:
    vocabulary = json.loads((model_folder / "tokenizer.json").read_text())["model"]["vocab"]
    return [entry[0] if isinstance(entry, list) else entry for entry in vocabulary]  # Unigram has [token, score]


def _plain(words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if len(word) > 2 and word.isascii() and word.isalpha() and word.islower())
