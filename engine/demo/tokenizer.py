"""The tokenizer: byte-level BPE of 4,096 tokens in which every digit stands alone, so that sums can be learned."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.demo.chat_format import CHAT_TEMPLATE_PATH, rendered_text
from engine.demo.corpus import documents
from engine.demo.encoded import END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS

VOCABULARY_SIZE = 4096
_NUM_DOCUMENTS = 40_000
_SEED = 7


def _texts(num_documents: int) -> Iterator[str]:
    return (rendered_text(document) for document in islice(documents(_SEED), num_documents))


def train_tokenizer(num_documents: int = _NUM_DOCUMENTS) -> Tokenizer:
    """Learn the merges from the first documents of a stream of its own; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_documents), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`."""
    return Tokenizer.from_file(str(path))


def _tokenizer_config(max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, which AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(max_length), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE_PATH.read_text())
