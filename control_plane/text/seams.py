r"""Finds the places at which a text may be cut so that its pieces have the token ids of the whole text.

A seam is a kind of place `x|b`: `x` is the last character of the text before the cut, `b` is what follows the cut.

| seam | x, before the cut | b, after the cut |
|---|---|---|
| space | an ASCII letter, digit or one of `, . ; :` | one space, then a visible ASCII character |
| line | a line feed after a visible character | a visible character, except `/` |
| ideograph | a Chinese character | `，` or `。` |

Claim: for two texts `A` that ends with x, and `B` that begins with b, `ids(A + B) = ids(A) + g(B)`, and `g(B)` does not
depend on `A`. So `g(B)` can be computed after any short text with the same seam, the `lead`:
`g(B) = ids(lead + B)[len(ids(lead)):]`. The lead also keeps away what tokenizers add at the start of a text
(`Prepend`, `Metaspace`, `add_prefix_space`).

The library works in four steps, each of them on the output of the one before. `seams_of` accepts a seam only if every
step is known to keep the claim. A tokenizer with an unknown part has no seam.

1. **Added tokens** are searched from left to right; the longest match at the first place wins. So the search separates
   at the cut if no added token (raw or normalized) contains characters from both sides. Text after an added token is
   handled like the start of a text, which must not depend on `A`: no added token ends with x. At a line's seam the
   added tokens that end with a line feed must consist of line feeds, and the line feed alone must be one of them: then
   every cut is behind one. `single_word`, and at a line's seam `lstrip` and `rstrip`, look across the cut: refused.
2. **Normalizers**: the accepted ones change each character alone, or compose and reorder combining characters, which
   never do so with a space, a line feed, or `，` and `。`. `Prepend` acts on the start only. `Strip`, `Precompiled` and
   patterns are refused. `BertNormalizer` makes spaces of line feeds, and puts some beside Chinese characters. Then only
   splitting at white space is accepted, which removes them, and no added token may be searched in normalized text.
3. **Pre-tokenizers** split the text into words. One that *splits* at a seam has a boundary between words there, and
   makes the same words left and right of it as for `A` and `B` alone. One that *keeps* makes the same words, but the
   last word of `A` and the first of `B` may be one word. After the first one that splits, every other one works within
   one word at a time.
   For a regular expression, let each alternative be one of `_ALTERNATIVES`. Then:
   a. No alternative matches x and the first character of b together, since a space follows a character that is no
      white space in none of them, a line feed is followed only by line ends (and by `/`, hence the exception), and
      punctuation follows a letter only as an apostrophe.
   b. At the cut, each test of an alternative that began in `A` has the same result for b and for the end of the text:
      a class that is to continue has no character of b; `(?![\p{L}_])` accepts a space, `，` and the end; `(?!\S)`
      is only tested after white space. This is the case for the line feed alone, since a visible character is before
      it: `\s+(?!\S)` matches it at the end of a text and not before b, but then `\s+`, `\s` or `\s*[\r\n]+` matches
      the same one character.
   c. No alternative looks back, so matches from the cut on are those of `B`.
   d. If an alternative matches every white space (for ideographs: all punctuation), no unmatched text reaches across
      the cut, so the expression splits; else it keeps, unless it has `\s+(?!\S)`, whose result depends on b.
4. **The model** encodes each word alone, and a cache changes no result. If no pre-tokenizer splits at the seam, the
   words left and right of it are one word. Then only BPE is accepted, and only if no token of the vocabulary reaches
   across the seam: every merge makes a token of the vocabulary, so no merge joins the two sides, and merges are ordered
   by rank, then by place. Characters at the seam must be in the vocabulary, since unknown ones are fused.
   `ignore_merges`, prefixes and suffixes look at the ends of words: refused. Unigram is refused here, because it
   adds up scores in floating point from the start of a word: equal scores may differ by their rounding.

Sources: huggingface/tokenizers 0.23 (`added_vocabulary.rs`, `metaspace.rs`, `byte_level.rs`, `bpe/model.rs`,
`bpe/word.rs`, `unigram/model.rs`). tests/control_plane/text/test_pieces.py compares pieces with whole texts.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer
from tokenizers import models as library

Name = Literal["space", "line", "ideograph"]
Effect = Literal["splits", "keeps"]
_NAMES: tuple[Name, ...] = ("space", "line", "ideograph")

_BEFORE_SPACE = string.ascii_letters + string.digits + ",.;:"
_CHINESE_JAPANESE_KOREAN = r"\u3001-\u3003\u3008-\u3011\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_BEFORE_LINE = rf"!-~{_CHINESE_JAPANESE_KOREAN}\uff01\uff0c\uff1a\uff1b\uff1f"
_AFTER_LINE = rf"!-.0-~{_CHINESE_JAPANESE_KOREAN}"
_IDEOGRAPHS = r"\u4e00-\u9fa5"

_CHARACTERWISE = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
_WHITE_SPACE = "white space"
_PUNCTUATION = "punctuation"
_ALTERNATIVES = {
    # GPT-2 (openai/gpt-2, encoder.py); the pattern of ByteLevel
    **dict.fromkeys(("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"), ""),
    r" ?\p{L}+": "",
    r" ?\p{N}+": "",
    r" ?[^\s\p{L}\p{N}]+": _PUNCTUATION,
    r"\s+(?!\S)": "",
    r"\s+": _WHITE_SPACE,
    # cl100k_base (openai/tiktoken), Llama 3, Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": "",
    r"[^\r\n\p{L}\p{N}]?\p{L}+": "",
    r"\p{N}{1,3}": "",
    r"\p{N}": "",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*": _PUNCTUATION,
    r"\s*[\r\n]+": "",
    # Qwen 3.5
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+": "",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*": _PUNCTUATION,
    # o200k_base (openai/tiktoken), GPT-OSS, Llama 4
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?": "",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?": "",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*": _PUNCTUATION,
    # Tekken, of mistralai/mistral-common
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+": "",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*": "",
    # DeepSeek V3 and R1: digits, Chinese and Japanese, the rest
    "[一-龥\u3040-ゟ゠-ヿ]+": "",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""": "",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+": "",
    r" ?[\p{P}\p{S}]+[\r\n]*": _PUNCTUATION,
    # the built-in model (demo_model/tokenizer.py); its little words are `_LITTLE_WORDS`
    " ": "",
    r"\p{L}+": "",
    r"\n+": "",
    r"[^\s\p{L}\p{N}]+": _PUNCTUATION,
    r"\s": _WHITE_SPACE,
}
"""What may stand between the `|` of a pattern, and of what it matches every character."""
_LITTLE_WORDS = re.compile(r" \(\?:[A-Za-z]+(?:\|[A-Za-z]+)*\)\(\?!\[\\p\{L\}_\]\)")


@dataclass(frozen=True)
class Seam:
    """A kind of place at which texts may be cut."""

    name: Name
    pattern: re.Pattern[str]
    """Ends at the cut, and looks ahead across it."""
    lead: str
    """A short text that ends at this seam."""


def seams_of(tokenizer: Tokenizer) -> tuple[Seam, ...]:
    """Return the seams that are proven for this tokenizer; none if it has an unknown part."""
    facts = _Facts(tokenizer)
    found = [_seam(name, facts) for name in _NAMES]
    return tuple(seam for seam in found if seam is not None)


class _Facts:
    """The parts of a tokenizer, as plain values."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.normalizers = _parts(tokenizer.normalizer, "normalizers")
        self.pre_tokenizers = _parts(tokenizer.pre_tokenizer, "pretokenizers")
        self.model: Any = tokenizer.model
        self.added: list[AddedToken] = list(tokenizer.get_added_tokens_decoder().values())

    @cached_property
    def added_forms(self) -> list[str]:
        """The texts that become added tokens, as they are and normalized."""
        forms = [token.content for token in self.added]
        if self._tokenizer.normalizer is not None:
            forms += map(self._tokenizer.normalizer.normalize_str, tuple(forms))
        return [form for form in forms if form]

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=False))


def _seam(name: Name, facts: _Facts) -> Seam | None:
    space = _space_after(facts.normalizers)
    if space is None or getattr(facts.model, "dropout", None):
        return None
    is_padded = space == _PADDED
    effect, space = _words(name, facts.pre_tokenizers, space)
    if effect is None or any(token.single_word or (is_padded and token.normalized) for token in facts.added):
        return None
    if effect == "keeps" and not _merges_alone(facts.model):
        return None
    across = facts.vocabulary if effect == "keeps" else frozenset[str]()
    if name == "space":
        return _space_seam(facts, across, space)
    if name == "line":
        return _line_seam(facts, across, space)
    return _ideograph_seam(facts) if effect == "splits" else None


def _space_seam(facts: _Facts, vocabulary: frozenset[str], space: str) -> Seam | None:
    """`vocabulary` has the tokens that could reach across the seam; none if words end there."""
    ends = {form[-1] for form in facts.added_forms}
    ends |= set(re.findall("(.)[ \u2581\u0120]", "\n".join((*vocabulary, *facts.added_forms))))
    ends |= {character.swapcase() for character in ends}  # added tokens are found after `Lowercase`, too
    before = [character for character in _BEFORE_SPACE if character not in ends]
    if vocabulary:
        before = [character for character in before if character in vocabulary and space in vocabulary]
    if not before:
        return None
    return Seam("space", re.compile(f"[{re.escape(''.join(before))}](?= [!-~])"), before[0])


def _line_seam(facts: _Facts, vocabulary: frozenset[str], space: str) -> Seam | None:
    if any(token.lstrip or token.rstrip for token in facts.added):
        return None
    ends = [form for form in facts.added_forms if form.endswith("\n")]
    is_one_token = any(token.content == "\n" and not token.special for token in facts.added)
    if ends and not (is_one_token and all(form.strip("\n") == "" for form in ends)):
        return None
    texts = "\x00".join((*vocabulary, *facts.added_forms))
    if re.search("[\n\u010a][^\x00\n\u010a\r\u010d\t\u0109 \u0120\u2581]", texts):
        return None
    if vocabulary and not _knows_line_feed(vocabulary, "\u010a" if space == "\u0120" else "\n", facts.model):
        return None
    return Seam("line", re.compile(f"[{_BEFORE_LINE}]\n(?=[{_AFTER_LINE}])"), "a\n")


def _ideograph_seam(facts: _Facts) -> Seam | None:
    forms = facts.added_forms
    if any(re.search(f"[{_IDEOGRAPHS}](?:[，。,]|$)", form) for form in forms):
        return None
    return Seam("ideograph", re.compile(f"[{_IDEOGRAPHS}](?=[，。])"), "一")


def _knows_line_feed(vocabulary: frozenset[str], line_feed: str, model: Any) -> bool:
    """Return whether a line feed is a token, and as a byte is part of no other token."""
    as_byte = "<0x0A>"
    if any(as_byte in token and token != as_byte for token in vocabulary):
        return False
    return line_feed in vocabulary or bool(model.byte_fallback and as_byte in vocabulary)


def _merges_alone(model: Any) -> bool:
    """Return whether a model joins symbols only by merges, wherever in a word they are."""
    if not isinstance(model, library.BPE):
        return False
    return not (model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)


_PADDED = "padded"
"""Instead of a space's written form: spaces may stand beside Chinese characters."""


def _space_after(normalizers: Iterable[Mapping[str, Any]]) -> str | None:
    """Return how a space is written after these normalizers; None if one of them is not known."""
    space = " "
    for part in normalizers:
        kind = part["type"]
        if kind == "Replace" and part["pattern"] == {"String": " "} and part["content"] == "\u2581":
            space = "\u2581"
        elif kind == "BertNormalizer":
            space = _PADDED
        elif kind not in _CHARACTERWISE and not (kind == "Prepend" and part["prepend"] == "\u2581"):
            return None
    return space


def _words(name: Name, pre_tokenizers: Iterable[Mapping[str, Any]], space: str) -> tuple[Effect | None, str]:
    """Return whether words end at a seam, and how a space is then written; None if that is not known."""
    for part in pre_tokenizers:
        effect = _effect(name, part, space)
        if effect != "keeps":
            return effect, space
        space = {"Metaspace": "\u2581", "ByteLevel": "\u0120"}.get(part["type"], space)
    return (None if space == _PADDED else "keeps"), space


def _effect(name: Name, part: Mapping[str, Any], space: str) -> Effect | None:
    kind = part["type"]
    if space == "\u0120":  # what comes after ByteLevel sees bytes
        return None
    if kind == "Digits":
        return "keeps"
    if kind == "Punctuation":
        is_local = part["behavior"] in ("Isolated", "Contiguous", "Removed")
        return ("splits" if name == "ideograph" else "keeps") if is_local else None
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        is_split = name != "ideograph" or kind != "WhitespaceSplit"
        return ("splits" if is_split else "keeps") if space != "\u2581" else None
    if space == _PADDED:
        return None
    if kind == "Metaspace":
        is_split = part["split"] and name == "space"
        return ("splits" if is_split else "keeps") if part["replacement"] == "\u2581" else None
    if kind == "ByteLevel":
        return _byte_level(name, part, space)
    return _split(name, part, space) if kind == "Split" else None


def _byte_level(name: Name, part: Mapping[str, Any], space: str) -> Effect | None:
    if space != " " or (part["add_prefix_space"] and name == "line"):  # the line feed may then follow a space
        return None
    return "splits" if part["use_regex"] else "keeps"


def _split(name: Name, part: Mapping[str, Any], space: str) -> Effect | None:
    if space == "\u2581":  # no space is left: nothing is split
        return "keeps" if part["pattern"] == {"String": " "} else None
    if part["behavior"] != "Isolated" or part["invert"] or "Regex" not in part["pattern"]:
        return None
    alternatives = _alternatives(part["pattern"]["Regex"])
    if not all(each in _ALTERNATIVES or _LITTLE_WORDS.fullmatch(each) for each in alternatives):
        return None
    matched = {_ALTERNATIVES.get(each, "") for each in alternatives}
    if (_PUNCTUATION if name == "ideograph" else _WHITE_SPACE) in matched:
        return "splits"
    return None if r"\s+(?!\S)" in alternatives else "keeps"


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern at the `|` that are in no group and no class."""
    parts, depth, in_class = [""], 0, False
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "|" and not depth and not in_class:
            parts.append("")
            continue
        if in_class:
            in_class = token != "]"
        elif token == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(token, 0)
        parts[-1] += token
    return parts


def _parts(part: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the library's description of each part of a normalizer or pre-tokenizer, nested sequences included."""
    if part is None:
        return []
    found: list[Mapping[str, Any]] = []
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        each = waiting.pop(0)
        if each["type"] == "Sequence":
            waiting[:0] = each[name]
        else:
            found.append(each)
    return found
