"""Tests that the op library's threads compute the same masks as llguidance's Python classes, bit for bit."""

from __future__ import annotations

import ctypes
import gc
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem_engine.demo import checkpoint_path
from tandem_engine.execution.grammar import native
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.matcher import GrammarFailed, MakeMatcher, Matcher
from tandem_engine.grammar import Grammar
from tandem_engine.ops.cpu import CpuOps, KernelsUnavailable, load_cpu_ops
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.grammar_source import LIMITS
from tests.tandem_engine.schemas import random_schema

_TOKENIZER = Path(checkpoint_path()) / "tokenizer.json"
_TOKENIZER_WORDS: dict[str, int] = json.loads(_TOKENIZER.read_text())["model"]["vocab"]
_VOCAB_SIZE = 3072
_ENDS = [2, 0]
_GRAMMARS = [
    Grammar("regex", r"( [a-z]{4,8}|-)*\x01"),
    Grammar("json_object"),
    Grammar("lark", 'start: "Dear " /[A-Z][a-z]*/ "."?'),
    *(Grammar("json_schema", json.dumps(random_schema(random.Random(seed)))) for seed in range(12)),
]


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    try:
        return load_cpu_ops(num_threads=2)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def native_guide(ops: CpuOps) -> Guide:
    guide = Guide(_TOKENIZER, _VOCAB_SIZE, _ENDS, ops.library)
    assert guide._native is not None
    return guide


@pytest.fixture(scope="module")
def plain_guide() -> Guide:
    return Guide(_TOKENIZER, _VOCAB_SIZE, _ENDS)


def words(mask: Words) -> list[int]:
    found: list[int] = mask[: _VOCAB_SIZE // 32].tolist()
    return found


def allowed(mask: Words) -> list[int]:
    bits = np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little")
    return [token for token in np.flatnonzero(bits).tolist() if token < _VOCAB_SIZE]


def masks_of(matchers: Sequence[Matcher], tokens: Sequence[tuple[list[int], Sequence[int]]]) -> None:
    """Compute the masks of matchers, and return them."""
    for matcher, (new_tokens, drafts) in zip(matchers, tokens, strict=True):
        matcher.request_masks(new_tokens, drafts)
    if builder := matchers[0].builder:
        builder.begin(matchers)
        builder.finish()


def masks(matcher: Matcher, new_tokens: list[int] | None = None, drafts: Sequence[int] = ()) -> Sequence[Words]:
    masks_of([matcher], [(new_tokens or [], drafts)])
    return matcher.masks()


def outcome(matcher: Matcher, new_tokens: list[int], drafts: list[int]) -> tuple[Sequence[Words], str]:
    try:
        return masks(matcher, new_tokens, drafts), ""
    except GrammarFailed as error:
        return [], str(error)


def walk(ours: MakeMatcher, plain: MakeMatcher, chance: random.Random) -> int:
    """Compare both along one answer, with drafts that are right, wrong and impossible; return the masks compared."""
    first, second = ours(), plain()
    new_tokens: list[int] = []
    drafts: list[int] = []
    num_compared = 0
    for _ in range(40):
        found, failure = outcome(first, new_tokens, drafts)
        expected, expected_failure = outcome(second, new_tokens, drafts)
        assert failure == expected_failure
        assert list(map(words, found)) == list(map(words, expected))
        if failure:
            break
        num_compared += len(found)
        new_tokens = [chance.choice(allowed(found[0]))]
        if new_tokens[0] in _ENDS:
            break
        if drafts and len(found) > 1 and chance.random() < 0.5:  # the draft was right
            new_tokens = [drafts[0]]
        guesses = [chance.choice(allowed(found[-1])), chance.randrange(_VOCAB_SIZE)]
        drafts = [token for token in guesses if token not in _ENDS and chance.random() < 0.6]
    return num_compared


def test_masks_are_the_same_along_random_answers(native_guide: Guide, plain_guide: Guide) -> None:
    chance = random.Random(7)
    num_compared = 0
    for grammar in _GRAMMARS:
        ours, plain = native_guide(grammar), plain_guide(grammar)
        num_compared += sum(walk(ours, plain, chance) for _ in range(6))
    assert num_compared > 1000


def test_answers_side_by_side_are_each_as_alone(native_guide: Guide, plain_guide: Guide) -> None:
    grammars = [Grammar("regex", f"[a-z ]{{{number},}}") for number in range(3, 40)]
    ours = [native_guide(grammar)() for grammar in grammars]
    plain = [plain_guide(grammar)() for grammar in grammars]
    chance = random.Random(3)
    new_tokens: list[list[int]] = [[] for _ in grammars]
    for _ in range(12):
        masks_of(ours, [(tokens, ()) for tokens in new_tokens])
        made = [matcher.masks() for matcher in ours]
        expected = [masks(matcher, tokens) for matcher, tokens in zip(plain, new_tokens, strict=True)]
        assert [words(mask) for [mask] in made] == [words(mask) for [mask] in expected]
        new_tokens = [[chance.choice([t for t in allowed(mask) if t not in _ENDS])] for [mask] in made]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: foo"),
        Grammar("json_schema", '{"not": {}}'),
        Grammar("json_schema", "[]"),
    ],
)
def test_grammars_are_refused_in_the_same_words(grammar: Grammar, native_guide: Guide, plain_guide: Guide) -> None:
    messages = []
    for guide in (native_guide, plain_guide):
        with pytest.raises(GrammarFailed) as raised:
            guide(grammar)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_answers_fail_in_the_same_words_and_alone(native_guide: Guide, plain_guide: Guide) -> None:
    grammar = Grammar("regex", "[a-z]{4}")
    may_begin = allowed(masks(native_guide(grammar)())[0])
    wrong = [token for token in range(_VOCAB_SIZE) if token not in may_begin][9:11]
    with pytest.raises(GrammarFailed) as expected:
        masks(plain_guide(grammar)(), wrong)
    bad, good = native_guide(grammar)(), native_guide(grammar)()
    masks_of([bad, good], [(wrong, ()), ([], ())])
    with pytest.raises(GrammarFailed) as failure:
        bad.masks()
    assert str(failure.value) == str(expected.value)
    assert words(good.masks()[0]) == words(masks(plain_guide(grammar)())[0])


def test_what_was_begun_and_never_taken_harms_nobody(native_guide: Guide) -> None:
    make = native_guide(_GRAMMARS[0])
    for _ in range(20):
        matchers = [make() for _ in range(8)]
        for matcher in matchers:
            matcher.request_masks([], [])
        builder: Any = matchers[0].builder
        builder.begin(matchers)
        del matchers, matcher
        gc.collect()
    assert any(words(masks(make())[0]))


def test_matchers_are_freed(native_guide: Guide, monkeypatch: pytest.MonkeyPatch) -> None:
    builder: Any = native_guide._native
    freed: list[int] = []
    make = native_guide(_GRAMMARS[0])
    free = builder.free

    def counting(handle: int) -> None:
        freed.append(handle)
        free(handle)

    monkeypatch.setattr(builder, "free", counting)
    kept = [make() for _ in range(native._MAX_USED + 3)]
    for matcher in kept:
        masks(matcher)
    del kept, matcher
    gc.collect()
    assert len(freed) == 3
    del make
    gc.collect()
    assert len(freed) == native._MAX_USED + 4


@pytest.mark.parametrize("installed", ["1.9.2", "1.9.1.post1", "2.0.0"])
def test_an_llguidance_that_was_not_tried_is_used_through_python(
    installed: str, ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patch releases too: nothing but a run of these tests would notice that a structure has changed."""
    monkeypatch.setattr(native, "version", lambda name: installed)
    guide = Guide(_TOKENIZER, _VOCAB_SIZE, _ENDS, ops.library)
    assert guide._native is None
    assert guide(_GRAMMARS[0])().builder is None


def test_structures_are_as_long_as_in_the_header() -> None:
    """Of llguidance 1.9, on 64 bits."""
    assert [ctypes.sizeof(each) for each in (native._Limits, native._MatcherInit, native._TokenizerInit)] == [
        56,
        80,
        96,
    ]


def test_what_other_answers_left_in_a_lexer_fails_nobody(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit allows one answer, but not a second one in the same lexer."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 400)
    guide = Guide(_TOKENIZER, _VOCAB_SIZE, _ENDS, ops.library)
    assert guide._native is not None
    begun_anew: list[int] = []
    fresh = native.Beginning.fresh

    def counting(beginning: native.Beginning) -> int:
        begun_anew.append(beginning.handle)
        return fresh(beginning)

    monkeypatch.setattr(native.Beginning, "fresh", counting)
    make = guide(Grammar("regex", "|".join(f"{letter}[a-z0-9]{{60}}{letter}" for letter in "abcdefghijklmnop")))
    letters = {letter: _TOKENIZER_WORDS[letter] for letter in "abcdefghijklmnop"}
    for token in letters.values():
        matcher = make()
        for new_tokens in ([], *[[token]] * 61):
            found = masks(matcher, list(new_tokens))
        assert allowed(found[0]) == [token]
        del matcher
    assert 1 < len(begun_anew) < len(letters)
