"""Tests that grammars are compiled once, in another thread, and that only a limited number is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from tandem_engine.execution.grammar.compiled import CompiledGrammars
from tandem_engine.execution.grammar.matcher import GrammarFailed, MakeMatcher
from tandem_engine.grammar import Grammar
from tandem_engine.ops.sampling import Words

_SECONDS = 20.0


class _Nothing:
    builder = None

    def request_masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None: ...

    def masks(self) -> list[Words]:
        return []


class Compiler:
    """Compiles once `may` is set; records the grammars."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.grammars: list[str] = []

    def __call__(self, grammar: Grammar) -> MakeMatcher:
        self.grammars.append(grammar.text)
        assert self.may.wait(_SECONDS)
        if grammar.text == "bad":
            raise GrammarFailed("no such rule")
        return _Nothing


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def regex(text: object) -> Grammar:
    return Grammar("regex", str(text))


def eventually(is_met: Callable[[], bool]) -> bool:
    passing = threading.Event()
    return any(is_met() or passing.wait(0.005) for _ in range(4000)) and is_met()


def test_it_is_compiled_beside_and_once(compiler: Compiler) -> None:
    compiled = CompiledGrammars(lambda: compiler)
    assert not compiled.is_ready(regex("a"))
    assert not compiled.is_ready(regex("a"))
    compiler.may.set()
    first, second = compiled.matcher(regex("a")), compiled.matcher(regex("a"))
    assert first is not second
    assert compiled.is_ready(regex("a"))
    assert compiler.grammars == ["a"]


def test_one_that_cannot_be_used_fails_each_of_its_requests(compiler: Compiler) -> None:
    compiler.may.set()
    compiled = CompiledGrammars(lambda: compiler)
    errors = []
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="no such rule") as raised:
            compiled.matcher(regex("bad"))
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert compiled.is_ready(regex("bad"))


def test_only_so_many_are_compiled_ahead(compiler: Compiler) -> None:
    compiled = CompiledGrammars(lambda: compiler)
    for number in range(40):
        assert not compiled.is_ready(regex(number))
    compiler.may.set()
    compiled.matcher(regex(31))
    assert compiler.grammars == [str(number) for number in range(32)]
    assert eventually(lambda: compiled.is_ready(regex(35))), "there is room now"


def test_the_oldest_are_forgotten(compiler: Compiler) -> None:
    compiler.may.set()
    compiled = CompiledGrammars(lambda: compiler)
    for number in range(70):
        compiled.matcher(regex(number))
        compiled.matcher(regex("often"))
    compiled.matcher(regex(69))
    compiled.matcher(regex(0))
    assert [compiler.grammars.count(text) for text in ("often", "69", "0")] == [1, 1, 2]
