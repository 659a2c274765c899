"""Text that grows token by token equals the text of all tokens, without partial characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.tokenizer import TextTokenizer
from tests.control_plane.api.model import CORPUS, byte_level_tokenizer


@lru_cache(maxsize=1)
def byte_level() -> TextTokenizer:
    return TextTokenizer(byte_level_tokenizer().to_str().encode(), {})


@lru_cache(maxsize=1)
def metaspace() -> TextTokenizer:
    """Build what Llama 2 and Gemma have: ▁ for spaces, bytes for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    state = json.loads(tokenizer.to_str())
    learned = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    vocabulary = [*learned[:3], *byte_tokens, *learned[3:]]  # as in Llama's: three special tokens, bytes, the rest
    state["model"]["vocab"] = {token: token_id for token_id, token in enumerate(vocabulary)}
    return TextTokenizer(json.dumps(state).encode(), {})


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(token_ids=st.lists(st.integers(0, byte_level_tokenizer().get_vocab_size() + 3), max_size=40))
def test_any_byte_level_tokens_give_the_text_of_decoding_them_at_once(token_ids: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(pieces(tokenizer.detokenizer(), token_ids)) == tokenizer.decode(token_ids)


@given(text=st.text(max_size=60))
def test_no_piece_of_a_valid_text_holds_a_broken_character(text: str) -> None:
    tokenizer = byte_level()
    grown = pieces(tokenizer.detokenizer(), tokenizer.encode_prompt(text))
    assert "".join(grown) == text
    assert sum(piece.count("\ufffd") for piece in grown) == text.count("\ufffd")


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = byte_level()
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(4, 260)}
    emoji = [by_byte[bytes([byte])] for byte in "😀".encode()]
    assert pieces(tokenizer.detokenizer(), emoji) == ["", "", "", "😀", ""]
    assert pieces(tokenizer.detokenizer(), emoji[:2]) == ["", "", "\ufffd"]


def test_special_tokens_are_never_text() -> None:
    tokenizer = byte_level()
    (hello,) = {tuple(tokenizer.encode_prompt("Hello")[1:])}
    assert "".join(pieces(tokenizer.detokenizer(), [2, *hello, 3, 1])) == "Hello"


@given(
    words=st.lists(st.sampled_from(["the", "fox", "  two", "Once", "jumps,", "world?", "z", "\n", "é", "世界", "😀"]))
)
def test_metaspace_tokens_give_the_text_of_decoding_them_at_once(words: list[str]) -> None:
    tokenizer = metaspace()
    token_ids = tokenizer.encode_prompt(" ".join(words))
    grown = pieces(tokenizer.detokenizer(), token_ids)
    assert "".join(grown) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in grown)


@given(split=st.integers(0, 30))
def test_an_answer_that_continues_a_prompt_keeps_the_space_between_them(split: int) -> None:
    tokenizer = metaspace()
    token_ids = tokenizer.encode_prompt("The quick brown fox jumps over the lazy dog.")
    prompt, answer = token_ids[:split], token_ids[split:]
    grown = "".join(pieces(tokenizer.detokenizer(prompt), answer))
    assert tokenizer.decode(prompt) + grown == tokenizer.decode(token_ids)


def test_special_tokens_between_words_do_not_eat_the_space_of_the_next() -> None:
    tokenizer = metaspace()
    first, second = tokenizer.encode_prompt("Once"), tokenizer.encode_prompt("upon")
    token_ids = [*first, 2, 1, *second]
    assert "".join(pieces(tokenizer.detokenizer(), token_ids)) == tokenizer.decode(token_ids) == "Once upon"


@pytest.mark.parametrize("kind", [byte_level, metaspace])
def test_the_bytes_of_tokens_joined_are_the_text(kind: object) -> None:
    tokenizer = kind()  # type: ignore[operator]
    text = "The fox says 你好 😀"
    token_ids = [token_id for token_id in tokenizer.encode_prompt(text) if token_id > 2]
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode().strip() == text
