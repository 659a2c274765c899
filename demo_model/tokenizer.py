"""Trains and loads the tokenizer: byte-level BPE of 3,072 tokens; digits and most spaces are separate tokens.

Separate digits let a small model learn sums. Separate spaces give a word one spelling at every place: after a space,
after a quote, in a tool's name. With GPT-2's rule (the space belongs to the word) the model must learn for every word
that `hare` in JSON is ` hare` in a sentence; trained on 8 M tokens with that rule, it copied every third value wrong.
The space stays attached only to the commonest short words, which are never copied alone: texts are then 27 % longer
than by GPT-2's rule, else 39 % (measured on this corpus).
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.chat_format import CHAT_TEMPLATE_PATH, rendered_text
from demo_model.corpus import documents
from demo_model.corpus.words import listed
from demo_model.encoded import END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS

VOCABULARY_SIZE = 3072
_WORDS_WITH_SPACE = listed(
    """the a an of is are and to in it its that this for with on or by as at be from not was were I you your my me we
    one two how what do does can has have which when until before after so if no then but more than"""
)
_PIECES = rf" (?:{'|'.join(_WORDS_WITH_SPACE)})(?![\p{{L}}_])| |\p{{L}}+|\p{{N}}|\n+|[^\s\p{{L}}\p{{N}}]+|\s"
"""What merges stay within: a little word with its space, a space, letters, one digit, line ends, other signs."""
_NUM_DOCUMENTS = 40_000
_SEED = 7


def _texts(num_documents: int) -> Iterator[str]:
    return (rendered_text(document) for document in islice(documents(_SEED), num_documents))


def train_tokenizer(num_documents: int = _NUM_DOCUMENTS) -> Tokenizer:
    """Learn the merges from the first documents of a stream of its own; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
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
