"""A vocabulary decodes exactly as the tokenizer that it was made from."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from control_plane.text.vocabulary import MAX_TOKEN_ID, Vocabulary, VocabularyData, vocabulary_of
from tandem_runtime.errors import InternalError
from tests.control_plane.api.model import CORPUS, byte_level_tokenizer
from tests.control_plane.text.test_detokenizer import metaspace


@lru_cache(maxsize=1)
def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def without_a_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "": 3, "far": 9}, unk_token="one"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def tokenizer_named(name: str) -> Tokenizer:
    if name == "metaspace":
        return metaspace()._tokenizer
    return {"byte level": byte_level_tokenizer, "word piece": word_piece}.get(name, without_a_decoder)()


def after_the_wire(tokenizer: Tokenizer) -> Vocabulary:
    data = msgspec.msgpack.encode(vocabulary_of(tokenizer))
    return Vocabulary(msgspec.msgpack.decode(data, type=VocabularyData))


@pytest.mark.parametrize("name", ["byte level", "metaspace", "word piece", "without a decoder"])
@given(token_ids=st.lists(st.integers(0, 1000), max_size=30), skip=st.booleans())
def test_any_tokens_are_decoded_as_the_tokenizer_decodes_them(name: str, token_ids: list[int], skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert after_the_wire(tokenizer).decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("name", ["byte level", "metaspace", "word piece", "without a decoder"])
def test_every_token_and_no_other_has_its_name(name: str) -> None:
    tokenizer = tokenizer_named(name)
    vocabulary = after_the_wire(tokenizer)
    for token_id in range(1000):
        assert vocabulary.id_to_token(token_id) == tokenizer.id_to_token(token_id)
    assert vocabulary.id_to_token(-1) is None


def test_one_huge_id_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(InternalError, match=r"id 4,194,304, the largest accepted one is 4,194,303"):
        vocabulary_of(Tokenizer(models.WordLevel({"a": 0, "b": MAX_TOKEN_ID}, unk_token="a")))
