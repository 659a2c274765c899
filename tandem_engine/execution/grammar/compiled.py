"""When is a grammar compiled?

By a thread of their own, one after the other, from when their first request is added: meanwhile answers go on. Each
once, however many requests come with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed, MakeMatcher, Matcher
from tandem_engine.scheduling.grammar import Grammar

_MAX_GRAMMARS = 64
"""Compiled ones, the least recently used of which are forgotten."""
_MAX_UNFINISHED = 32
"""That are compiled ahead; of further ones each is begun when its request would draw."""


class CompiledGrammars:
    """One thread calls; another compiles."""

    def __init__(self, guide: Callable[[], Compile]) -> None:
        """`guide` is called at the first grammar; raises GrammarFailed where there can be none."""
        self._guide = guide
        self._compile: Compile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._grammars: OrderedDict[Grammar, Future[MakeMatcher]] = OrderedDict()

    def is_ready(self, grammar: Grammar) -> bool:
        """Return whether `matcher` would not wait; if it would, its compilation has begun now, or soon will."""
        if grammar not in self._grammars and self._num_unfinished >= _MAX_UNFINISHED:
            return False
        return self._future(grammar).done()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the grammar's beginning; raises GrammarFailed."""
        try:
            make = self._future(grammar).result()
        except GrammarFailed as error:  # one of its own for each request
            raise GrammarFailed(str(error)) from error
        return make()

    @property
    def _num_unfinished(self) -> int:
        return sum(not future.done() for future in self._grammars.values())

    def _future(self, grammar: Grammar) -> Future[MakeMatcher]:
        if grammar not in self._grammars:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._grammars[grammar] = self._thread.submit(self._compiled, grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return self._grammars[grammar]

    def _compiled(self, grammar: Grammar) -> MakeMatcher:
        self._compile = self._compile or self._guide()
        return self._compile(grammar)


def no_guide() -> Compile:
    """Stand in where nothing reads grammars."""
    raise GrammarFailed("this runner was made without anything that reads grammars")
