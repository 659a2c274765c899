"""Writes a model's files with a generated tokenizer: random byte-level tokens, each made of two others (BPE)."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

NUM_TOKENS = 128_000
_MAX_CHARACTERS = 12
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def write_model(folder: Path, num_tokens: int = NUM_TOKENS, seed: int = 128) -> None:
    """Write config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True)
    vocabulary, merges = _tokens(num_tokens - 1, random.Random(seed))
    eos_token_id = len(vocabulary)
    end = {"id": eos_token_id, "content": "<|end|>", "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": split,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": num_tokens, "eos_token_id": eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))


def _tokens(count: int, chance: random.Random) -> tuple[dict[str, int], list[list[str]]]:
    """Return ids by token and merges in order: all bytes, some words, then random pairs of tokens before."""
    tokens = _byte_characters()
    known = dict.fromkeys(tokens)
    merges: list[list[str]] = []

    def merge(left: str, right: str) -> None:
        if len(left) + len(right) <= _MAX_CHARACTERS and left + right not in known:
            known[left + right] = None
            tokens.append(left + right)
            merges.append([left, right])

    for first in string.ascii_lowercase:
        merge("Ġ", first)
        for second in string.ascii_lowercase:
            merge(f"Ġ{first}", second)
    while len(tokens) < count:
        merge(chance.choice(tokens), chance.choice(tokens))
    return {token: index for index, token in enumerate(tokens)}, merges


def _byte_characters() -> list[str]:
    """Return GPT-2's characters for the 256 bytes: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
