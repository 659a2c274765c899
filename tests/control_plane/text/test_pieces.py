"""A text in pieces has the token ids of the whole text, for every kind of tokenizer that is accepted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from control_plane.text.pieces import PIECE_CHARACTERS, PieceEncoder
from control_plane.text.seams import seams_of
from tandem_engine.demo import checkpoint_path
from tests.control_plane.api.model import CORPUS as SENTENCES

CL100K = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
QWEN2 = CL100K.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
CODE = (
    "int main(void) {\n  return 0; // done\n}\n/* a\nb */\n\nx = [1, 2, 3];\ny = foo(x)[0];\n}\n}\n# the end\n"
    + "}\n// x\n}\n//\n" * 9
)
CORPUS = [
    *SENTENCES,
    CODE,
    *(["the end \n", "the end\n\n"] * 9),
    "你好，世界。我们走吧，朋友。\n第一行\n第二行。\n",
    "The end. The end, of the day. 12, 345: 6; a b c.",
]

ALL = {"space", "line", "ideograph"}
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def bpe(*parts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Train a byte-level BPE; the last part is ByteLevel."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(list(parts))
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level(**options: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def patterned(*patterns: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    return bpe(*map(split, patterns), byte_level(use_regex=False), normalizer=normalizer)


def sentencepiece_bpe(**parts: object) -> Tokenizer:
    """Train a BPE with ▁ for spaces and bytes for what the vocabulary lacks; it then gets other parts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in CORPUS * 3], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["content"] in SPECIAL]
    state["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(state))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def gemma() -> Tokenizer:
    tokenizer = sentencepiece_bpe(
        normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")
    )
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 5)])
    tokenizer.add_tokens([AddedToken("▁" * count, normalized=False) for count in range(2, 5)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def word_level() -> Tokenizer:
    words = {word: place for place, word in enumerate(["<unk>", "the", "end", ",", ".", "世界", "，", "Hello", "//"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def neox() -> Tokenizer:
    tokenizer = bpe(byte_level(), normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 9)])
    return tokenizer


def oddly_extended(tokenizer: Tokenizer) -> Tokenizer:
    """Add tokens that take white space beside them, or have some inside or at an edge."""
    tokenizer.add_tokens(
        [
            AddedToken("end", rstrip=True),
            AddedToken("foo bar"),
            AddedToken(" the"),
            AddedToken("you "),
            AddedToken("day", normalized=True),
            AddedToken("<mask>", lstrip=True),
            AddedToken(";\n"),
        ]
    )
    return tokenizer


MADE: dict[str, tuple[Callable[[], Tokenizer], set[str]]] = {
    "gpt-2": (lambda: bpe(byte_level()), ALL),
    "gpt-2, a space first": (lambda: bpe(byte_level(add_prefix_space=True)), {"space", "ideograph"}),
    "gpt-neox": (neox, ALL),
    "starcoder": (lambda: bpe(pre_tokenizers.Digits(individual_digits=True), byte_level()), ALL),
    "falcon": (
        lambda: bpe(pre_tokenizers.Punctuation("contiguous"), byte_level(), pre_tokenizers.Digits(), split("[0-9]{3}")),
        ALL,
    ),
    "llama 3": (lambda: patterned(CL100K), ALL),
    "qwen 2": (lambda: patterned(QWEN2, normalizer=normalizers.NFC()), ALL),
    "qwen 3.5": (lambda: patterned(QWEN35, normalizer=normalizers.NFC()), ALL),
    "o200k": (lambda: patterned(O200K), ALL),
    "o200k, NFKC": (lambda: patterned(O200K, normalizer=normalizers.NFKC()), ALL),
    "tekken": (lambda: patterned(TEKKEN), ALL),
    "deepseek": (lambda: patterned(*DEEPSEEK), ALL),
    "built-in": (lambda: Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json")), ALL),
    "bytes, no words": (lambda: bpe_without_words(), {"space", "line"}),
    "llama 2": (
        lambda: sentencepiece_bpe(
            normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        ),
        {"space", "line"},
    ),
    "mistral": (
        lambda: sentencepiece_bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        {"space", "line"},
    ),
    "gemma": (gemma, {"space", "line"}),
    "unigram": (unigram, {"space"}),
    "bert": (bert, ALL),
    "word level": (word_level, ALL),
    "gpt-2, odd added tokens": (lambda: oddly_extended(bpe(byte_level())), {"space", "ideograph"}),
    "gpt-2, odd added tokens, lower case": (
        lambda: oddly_extended(bpe(byte_level(), normalizer=normalizers.Lowercase())),
        {"space", "ideograph"},
    ),
    "llama 2, odd added tokens": (
        lambda: oddly_extended(
            sentencepiece_bpe(
                normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            )
        ),
        {"space"},
    ),
}


def bpe_without_words() -> Tokenizer:
    """Return a byte-level BPE whose pre-tokenizer makes no words, though its merges were learned in words."""
    tokenizer = patterned(CL100K)
    tokenizer.pre_tokenizer = byte_level(use_regex=False)
    return tokenizer


@cache
def made(name: str) -> Tokenizer:
    return MADE[name][0]()


@cache
def encoder(name: str, piece_characters: int = 1) -> PieceEncoder:
    return PieceEncoder(made(name), piece_characters)


WORDS = """The the end END of day Day you Hello don't HTML's I'LL foo bar thelma 12345 3.14 1, 2 , . a I é e\u0301
    \u0301 😀 👩\u200d👧 世界 你好， 。 ， 、 （ か\u3099 한국 Σ ſ ŉ _ 's ' - !? \u2581 \u0120 Привет / // } ( ) |
    <|im_end|> <s> </s> <unk> [SEP] <mask> <0x0A>"""
SPACES = [
    " ",
    "  ",
    "   ",
    ", ",
    ". ",
    "; ",
    ": ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    ";\n",
    "}\n",
    " \n",
    "\n ",
    "a b",
    "foo bar",
]
RARE = ["\u00a0", "\u3000", "\x00", "\x85", "\u2028", "e\n//", "e\n/", "。\n一"]
fragments = st.sampled_from([*WORDS.split(), *SPACES, *RARE])
texts = st.lists(fragments | st.text(st.characters(codec="utf-8"), max_size=3), max_size=24).map("".join)


@pytest.mark.parametrize("name", MADE)
def test_a_known_tokenizer_has_its_seams(name: str) -> None:
    assert {seam.name for seam in encoder(name).seams} == MADE[name][1]


@settings(max_examples=150, deadline=None)
@given(text=texts, add_special_tokens=st.booleans())
@example(text="The end of a day, the end", add_special_tokens=True)
@example(text="}\n//x;\n/y\nthe\n世界。\n一", add_special_tokens=False)
def test_pieces_of_a_text_have_the_ids_of_the_whole(text: str, add_special_tokens: bool) -> None:
    """Every tokenizer gets every text: to make one takes longer than to encode it."""
    for name in MADE:
        expected = made(name).encode(text, add_special_tokens=add_special_tokens).ids
        assert list(encoder(name).ids(text, add_special_tokens=add_special_tokens)) == expected, name


@pytest.mark.parametrize("name", MADE)
def test_a_long_text_is_cut_at_every_kind_of_seam(name: str) -> None:
    chance = random.Random(name)
    words = ["The", "end", "of", "a", "day", "12", "34,", "你好，", "世界。", "foo(x);", "}", "//", "😀", "<|im_end|>"]
    ends = [" ", " ", " ", "", "\n", "\n\n", "  "]
    text = "".join(chance.choice(words) + chance.choice(ends) for _ in range(6000))
    expected = made(name).encode(text, add_special_tokens=True).ids
    for piece_characters in (1, 100, 1000):
        encoded = encoder(name, piece_characters)
        assert list(encoded.ids(text, add_special_tokens=True)) == expected
        pieces = list(encoded._pieces(text))
        assert "".join(piece for _, piece in pieces) == text
        assert max(len(piece) for _, piece in pieces) < piece_characters + 1000
    assert {seam.name for seam, _ in encoder(name)._pieces(text) if seam is not None} <= MADE[name][1]
    assert len(list(encoder(name)._pieces(text))) > 500


@pytest.mark.parametrize("name", ["llama 3", "gemma", "llama 2"])
@settings(max_examples=120)
@given(text=texts)
def test_pieces_equal_the_whole_when_control_tokens_are_text(name: str, text: str) -> None:
    tokenizer = Tokenizer.from_str(made(name).to_str())
    tokenizer.encode_special_tokens = True
    assert list(PieceEncoder(tokenizer, 1).ids(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_ordinary_texts_are_cut_into_pieces_of_about_the_least_length() -> None:
    for text in ("The end of the day, my friend.\n" * 3000, "你好，世界。我们走吧" * 9000, "x = [1, 2];\n" * 9000):
        pieces = [piece for _, piece in encoder("llama 3", PIECE_CHARACTERS)._pieces(text)]
        assert len(pieces) > 3 and max(map(len, pieces)) < 1.1 * PIECE_CHARACTERS


def test_a_text_without_a_place_for_a_cut_is_encoded_whole() -> None:
    text = "a" * 5000
    assert len(list(encoder("llama 3", 100)._pieces(text))) == 1
    assert list(encoder("llama 3", 100).ids(text)) == made("llama 3").encode(text, add_special_tokens=False).ids


def test_a_template_that_does_more_than_add_tokens_gets_the_whole_text() -> None:
    tokenizer = bpe(byte_level())
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 1)])
    text = "The end of the day."
    assert list(PieceEncoder(tokenizer, 1).ids(text, add_special_tokens=True)) == tokenizer.encode(text).ids


def _changed(change: Callable[[Tokenizer], object], of: Callable[[], Tokenizer]) -> Tokenizer:
    tokenizer = of()
    change(tokenizer)
    return tokenizer


def _with(**parts: object) -> Callable[[Tokenizer], object]:
    def change(tokenizer: Tokenizer) -> None:
        for name, part in parts.items():
            setattr(tokenizer, name, part)

    return change


def _of_model(name: str, value: object) -> Callable[[Tokenizer], object]:
    return lambda tokenizer: setattr(tokenizer.model, name, value)


def _gpt_2() -> Tokenizer:
    return bpe(byte_level())


UNPROVEN: dict[str, tuple[Callable[[], Tokenizer], Callable[[Tokenizer], object]]] = {
    "strips": (_gpt_2, _with(normalizer=normalizers.Strip())),
    "replaces by a pattern": (_gpt_2, _with(normalizer=normalizers.Replace(Regex(" +"), " "))),
    "prepends a word": (_gpt_2, _with(normalizer=normalizers.Prepend("x"))),
    "an unknown pattern": (lambda: patterned(r"\w+ \w+|\s+"), lambda tokenizer: None),
    "a pattern with one unknown alternative": (lambda: patterned(CL100K + r"|(?<= )x"), lambda tokenizer: None),
    "words merged with their spaces": (
        _gpt_2,
        _with(pre_tokenizer=pre_tokenizers.Split(Regex(r"\s+"), "merged_with_previous")),
    ),
    "spaces without ▁": (_gpt_2, _with(pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"))),
    "words of a fixed length": (_gpt_2, _with(pre_tokenizer=pre_tokenizers.FixedLength(5))),
    "scripts": (_gpt_2, _with(pre_tokenizer=pre_tokenizers.UnicodeScripts())),
    "bytes before words": (
        lambda: patterned(CL100K),
        _with(pre_tokenizer=pre_tokenizers.Sequence([byte_level(use_regex=False), split(CL100K)])),
    ),
    "▁ before a pattern": (lambda: patterned(CL100K), _with(normalizer=normalizers.Replace(" ", "▁"))),
    "spaces beside Chinese": (lambda: patterned(CL100K), _with(normalizer=normalizers.BertNormalizer())),
    "chance": (_gpt_2, _of_model("dropout", 0.5)),
    "whole words of the vocabulary, no words": (sentencepiece_bpe, _of_model("ignore_merges", True)),
    "unigram, no words": (unigram, _with(pre_tokenizer=pre_tokenizers.Metaspace(split=False))),
    "a token that is a single word": (
        _gpt_2,
        lambda tokenizer: tokenizer.add_tokens([AddedToken(" the", single_word=True)]),
    ),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_a_tokenizer_without_a_proof_has_no_seam(name: str) -> None:
    of, change = UNPROVEN[name]
    tokenizer = _changed(change, of)
    assert seams_of(tokenizer) == ()
    if name != "chance":
        text = "The end\nof 你好，"
        assert list(PieceEncoder(tokenizer, 1).ids(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_token_across_a_seam_forbids_the_character_before_it() -> None:
    tokenizer = sentencepiece_bpe(normalizer=normalizers.Replace(" ", "▁"))
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["e▁"] = len(state["model"]["vocab"])
    state["model"]["merges"].insert(0, ["e", "▁"])
    joined = Tokenizer.from_str(json.dumps(state))
    text = "The end of the day the end"
    assert "e▁" in joined.encode(text).tokens
    pieces = [piece for _, piece in PieceEncoder(joined, 1)._pieces(text)]
    assert pieces == ["The end", " of the day the end"] or not any(piece.endswith("e") for piece in pieces[:-1])
    assert list(PieceEncoder(joined, 1).ids(text)) == joined.encode(text).ids
